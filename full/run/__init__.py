"""A run around the steps: settings, questions, files. It carries on the program of `train_grpo.py`.

Read config, conflicts and flags (settings); tasks, text and questions (data); build (models);
directory, saves, logs and export (files); run, which ties them, and exits (how it ends). Commands
import from it, and audit does.
"""
