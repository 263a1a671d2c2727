"""How close a plan stays to the receiver's own full prefill: from the logits that verify the draft anyway."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Draft(NamedTuple):
    """The receiver's answer behind its own full prefill, n tokens.

    Attributes:
        token_ids: The answer, with the id that ends it if one does.
        log_probs: `(n, vocabulary)` float32: of every token, behind the context, the suffix and the tokens before it.
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor


class Fidelity(NamedTuple):
    """Means over the tokens of full prefill's answer, each behind the ones before it.

    Attributes:
        kl: KL divergence of the plan's next-token distribution from full prefill's, KL(full prefill ‖ plan), in nats.
        nll: Negative log-likelihood of the answer's tokens under the plan, in nats.
        top1_agreement: Share of the answer's tokens that the plan would choose.
    """

    kl: float
    nll: float
    top1_agreement: float


def fidelity(draft: Draft, logits: torch.Tensor) -> Fidelity | None:
    """Returns the fidelity of a plan, None if the logits of either are not finite or the vocabularies differ in size.

    Args:
        draft: The answer of full prefill.
        logits: `(n, vocabulary)` of the plan at the draft's positions.
    """
    if logits.shape != draft.log_probs.shape:
        return None
    of_draft = draft.log_probs.to(logits.device)  # the sender's logits may lie elsewhere
    log_probs = logits.float().log_softmax(dim=-1)
    if not all(bound.isfinite() for one in (log_probs, of_draft) for bound in one.aminmax()):
        return None
    chosen = torch.tensor(draft.token_ids, device=logits.device)
    kl = torch.nn.functional.kl_div(log_probs, of_draft, reduction="batchmean", log_target=True)
    nll = torch.nn.functional.nll_loss(log_probs, chosen)
    agree = (logits.argmax(dim=-1) == chosen).float().mean()
    return Fidelity(kl.clamp_min(0).item(), nll.item(), agree.item())
