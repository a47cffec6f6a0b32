"""torch-echo's plans for joint graphs beside those of PyTorch's memory-budget partitioner: ``torch-echo bench planner``.

===========  ================================================================================
``models``   what is trained
``judge``    peak and extra time of a partition, whoever made it, read off its two graphs
``sweep``    both systems over PyTorch's budgets, on one model
``output``   table, JSON, picture
===========  ================================================================================
"""
