"""Six Triton kernels, from moving memory to tensor cores: lessons, and probes of a GPU.

Each file has one kernel and the function that launches it. `catalogue` says what each shows; `python -m cordee.kernels`
compiles them without a GPU, checks their numbers in Triton's interpreter, and measures them where a GPU is.
"""
