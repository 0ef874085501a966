"""Text on the API side: tokenizer, detokenizer, chat templates, fill-in-the-middle prompts,
grammars. Imports no torch.
"""
