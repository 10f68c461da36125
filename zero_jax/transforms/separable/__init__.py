"""Whether a loss may be called on parts of a batch, and the loss on a part that adds up to that of the batch.

`separability` compares traces of a loss on the batch and on parts of it; `quotients` finds what it is divided by. By
these `counts` makes the loss on a part by numbers of the batch, such as its tokens, and `weights` what a part weighs.
"""
