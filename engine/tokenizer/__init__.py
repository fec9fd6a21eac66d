"""Text to ids and back: the chat tokenizer, templates, and the detokenizer of a streaming reply."""

from engine.tokenizer.chat_tokenizer import ChatTokenizer

__all__ = ["ChatTokenizer"]
