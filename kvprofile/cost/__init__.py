"""What plans cost, in closed forms: FLOPs and bytes. No torch."""
