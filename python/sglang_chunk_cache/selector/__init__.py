"""The selector: a small auxiliary model, in a process of its own on the CPU, that scores chunk tokens (CacheClip).

messages    what the two processes say to each other
client      in the process that tokenizes: asks, waits no longer than it should, starts the process again
__main__    the process: prepares chunks, answers questions
desk        which of the waiting questions comes next, and which chunks are prepared meanwhile
scorer      chunk and question in, one score per token of the main model out
auxiliary   the model: keys and values of texts, last-layer attention of a question
alignment   from the tokens of one tokenizer to those of another, by characters
train       the older way to call `chunk-cache train-selector`, which is `sglang_chunk_cache.selector_training`
"""
