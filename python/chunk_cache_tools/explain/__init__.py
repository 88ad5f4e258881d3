"""Explain: what became of every token of one prompt, under several methods, as a picture.

    explain_client     asks a server, once per method    asked_conditions  methods, ratios and options of the flags
    shown_prompt       text, token ids, readable tokens  replies           replies in files
    states             a reply -> one state per token    summary           the tables of methods
    layout             tokens -> lines of cells          palette           colours and words of states
    picture            PNG and SVG, by matplotlib        explain_page      one HTML file

matplotlib comes with the extra `bench`.
"""
