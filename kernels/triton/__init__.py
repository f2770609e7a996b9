"""The operations of paper section 5.1 as Triton kernels, with the signatures of `reference`."""
