"""What is asked, and what a model knows by heart."""

ASKED = (
    "Write a long poem about rain.",
    "Give me twenty tips to sleep better.",
    "Write a long essay about the sea.",
    "Describe in detail how bread is baked.",
    "Write a detailed plan for a week in Rome.",
    "Explain in detail how a bicycle stays upright.",
    "Write a long letter to a friend who moved away.",
    "Write a long story about a lighthouse keeper.",
    "Explain at length how a computer works.",
    "Write a long speech for a wedding.",
    "Describe a walk through a forest in autumn.",
    "Write a long fairy tale about a fox and a crow.",
    "Write a song with a chorus.",
    "Tell me a very long story about a dragon.",
    "Write a dialogue between a cat and a dog.",
    "List 50 synonyms of good.",
    "Write a long list of things to do in Paris.",
    "What are the advantages of solar energy? List thirty.",
    "Say na na na na forever.",
    "Write unit tests for an add function.",
    "Describe every planet.",
)
BY_HEART = (
    "The quick brown fox jumps over the lazy dog.",
    "All work and no play makes Jack a dull boy.",
    "She sells sea shells by the shore.",
    "Little star, how I wonder what you are.",
    "We help people with honest answers every single day.",
    "My dear friend, it rains again.",
    "Once upon a time there was an old king.",
)
"""No token comes twice."""
