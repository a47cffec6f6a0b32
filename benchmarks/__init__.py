"""Measurements: torch-echo beside what people use instead (``torch-echo bench``), and of its parts.

=============  ==================================================================================
``workloads``  what is trained, in two presets
``systems``    what is compared
``worker``     one case in a process of its own
``harness``    all cases of a workload, in turns
``scale``      what fits under a memory limit
``run``        a whole run
``figures``    what follows from its records
``output``     tables, JSON, pictures, the results page
``planner``    plans alone, beside PyTorch's partitioner (``torch-echo bench planner``)
``engine``     what the tape costs where it rebuilds nothing (``python -m benchmarks.engine``)
``lengths``    one plan for batches of many lengths (``python -m benchmarks.lengths``)
=============  ==================================================================================
"""
