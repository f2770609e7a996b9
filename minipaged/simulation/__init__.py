"""The same scheduler and memory manager on a simulated clock: experiments without a GPU. No torch."""
