"""Both ways to train on a tree of tokens, for models and batches of any size: `tree_attention.py`.

Read trie (sequences as arrays, in a tree or end to end; edges, chunks; which sequences a
micro-batch and a rank has), forest (attention and recurrent layers of a row), chunks (depth first,
in bounded memory). Others import `TokenTrie`, `FlatTokens`, what cuts and scores them,
`MaskedAttention` and `tree_backward`.
"""
