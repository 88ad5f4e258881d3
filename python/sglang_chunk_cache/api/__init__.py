"""What a client sends and gets back: marks, options, bad input, replies, on every route.

`marks` splits marked text, `tokens` tokenizes its pieces, `prepare` turns a request into token ids and one JSON string
of options, `body` refuses a bad `/generate` body early, `openai` and `chat` adapt the OpenAI routes, `reply` brings the
scheduler's answer into `meta_info`.
"""
