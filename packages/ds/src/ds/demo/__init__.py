"""The demo: a small GPT on English text, from raw text to generated text, under ZeRO on several ranks."""
