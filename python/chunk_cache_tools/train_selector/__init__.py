"""`chunk-cache train-selector`: fine-tunes the small model of the method cacheclip; needs the server's packages."""
