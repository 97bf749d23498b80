"""Distributed training: strategies for one or several processes, and how the processes are launched."""
