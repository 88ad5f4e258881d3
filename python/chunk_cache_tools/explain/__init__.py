"""Explain: what became of every token of one prompt, under several methods, as a picture.

    chunk-cache explain --url http://127.0.0.1:30000 --prompt FILE

    ask      a server, once per method          specs    what is asked: methods and their options
    prompt   its text, token ids and readable tokens
    states   a reply -> one state per token     replies  replies in files
    layout   tokens -> lines of cells           summary  the table of methods
    picture  PNG and SVG, by matplotlib         page     one HTML file
    palette  colours and words of states, for both

Nothing here is needed to serve; matplotlib and rich come with the extra `bench`.
"""
