"""Both ways to train on a tree of tokens, for models and batches of any size: `tree_attention.py`.

Read trie (the tree as arrays, its chunks, its edges, the shares of ranks), chunks (depth first, in
bounded memory), forest (recurrent layers on trees). Others import `TokenTrie`, its edges and
shares, `tree_backward` and the forests.
"""
