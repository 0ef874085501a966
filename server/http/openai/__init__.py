"""OpenAI's dialect: completions, chat completions and models, and llama.cpp's infill, whose clients
read the same errors.
"""
