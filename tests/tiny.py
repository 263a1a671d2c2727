"""A tokenizer small enough to train in a test: byte-level BPE with a chat template of the usual shape."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "The cat sat on the mat and the dog sat on the log.",
    "Answer the question based on the given passages.\n\nQuestion: who sat on the mat?\nAnswer: the cat",
    "def answer(question):\n    return question.strip()\n",
)


def tiny_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of about 350 tokens; the same one every time."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=specials[0], eos_token=specials[1], pad_token=specials[1]
    )
    tokenizer.chat_template = chat_template
    return tokenizer
