"""A run around the steps: settings, questions, files. It carries on the program of `train_grpo.py`.

Read config, conflicts and flags (settings); text and tasks (data); build (models);
directory and logs (files); and run, which ties them. Commands import from it, and audit does.
"""
