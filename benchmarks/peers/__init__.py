"""Ours beside `transformers.generate` and llama.cpp (xllamacpp): the same file, threads and prompts, in turn."""
