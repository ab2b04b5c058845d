"""Memory of a training step as it is: the model's own code, run on fake tensors on a CPU, on rank 0 of N fake ranks.

`python -m cordee.train.trace_memory` reads a question and prints an answer, both JSON. torch is imported by `subject`,
`sharding`, `step`, `tracker`, `kernels`, `titan` and `world` alone; what they record is judged without it.
"""
