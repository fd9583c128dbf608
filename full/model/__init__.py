"""What a model is beyond `models.py`: files, kinds of layer, dtypes, and its parts on ranks.

Read config and transformer, then experts, deltanet and logprobs, which are its parts; cache
(generation's keys and values); lora (factors) and hf (files); exact (the sampler is the trainer bit
for bit); parallelize (a model by a plan, and its weights to samplers). Others import the classes of
models, and functions that make, read, write, split or send a model.
"""
