"""Do a run around the steps: settings, data and files. Extends the program of `train_grpo.py`.

Read config, conflicts and flags (settings); text and tasks (data); build (models); directory and
logs (files); and run, which connects them. Only commands and the audit import from this room.
"""
