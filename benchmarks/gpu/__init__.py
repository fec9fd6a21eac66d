"""The Triton kernels and whole decode steps on the present card, beside peers in the same run."""
