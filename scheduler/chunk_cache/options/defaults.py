"""What a server uses where nobody says otherwise."""

DEFAULT_METHOD = "near-words"
DEFAULT_RATIO = 0.15
DEFAULT_SEPARATOR = "<|chunk|>"
