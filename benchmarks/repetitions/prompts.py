"""What is asked, and what a reply is made to go on with."""

ASKED = (
    "Write a poem about rain.",
    "Write a song with a chorus.",
    "Tell me a very long story about a dragon.",
    "Write a dialogue between a cat and a dog.",
    "List 50 synonyms of good.",
    "Give me twenty tips to sleep better.",
    "Write a long list of things to do in Paris.",
    "What are the advantages of solar energy? List thirty.",
    "Tell me something about the sea.",
    "Say na na na na forever.",
    "Write unit tests for an add function.",
    "Describe every planet.",
)
CHANTS = (
    "The quick brown fox jumps over the lazy dog.",
    "All work and no play makes Jack a dull boy.",
    "Happy birthday to you, happy birthday to you.",
    "Peter Piper picked a peck of pickled peppers.",
    "She sells sea shells by the sea shore.",
    "Humpty Dumpty sat on a wall, Humpty Dumpty had a great fall.",
    "I will not talk in class again.",
    "London Bridge is falling down, falling down, falling down.",
    "Twinkle, twinkle, little star, how I wonder what you are.",
    "The wheels on the bus go round and round.",
    "How much wood would a woodchuck chuck?",
    "Fuzzy Wuzzy was a bear, Fuzzy Wuzzy had no hair.",
)
CHANTED = 80
"""Lines of a chant that are there already: enough that a penalty does not end it."""
