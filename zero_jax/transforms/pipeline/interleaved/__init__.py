"""The loop over ticks in which a stage goes forward on one microbatch and backward on another: 1F1B.

With V groups of layers on each of S stages, stage s is in the tick t forward at number t - s of what it does
(`Ticks.work`), and backward at number t - (S V - 1) - (S - 1 - s), its groups in reverse order: in the last group of
the last stage a microbatch goes backward in the tick in which it arrives. Of the groups that are between the two, at
most 2 S V - 1, a stage keeps what the backward pass of its layers reads: their inputs if they are recomputed, else what
their own remat says. The first S V - 1 ticks only go forward, the last S V - 1 only backward. So activations are sent
once forward and once backward through each group, and nothing grows with the number of microbatches.

With S = 3 and V = 1, where n is the microbatch n forward and n' backward::

    tick       0  1  2     3     4     5     6   7   8
    stage 0    0  1  2     3     4 0'  1'    2'  3'  4'
    stage 1       0  1     2 0'  3 1'  4 2'  3'  4'
    stage 2          0 0'  1 1'  2 2'  3 3'  4 4'
    loops      f---  fbe-----------------------  b-----

and with S = 2 and V = 2, whose groups are a and b. Microbatches end in the ticks that have an `e`::

    tick       0   1   2   3       4       5       6       7       8       9   10  11
    stage 0    0a  1a  0b  1b      2a 0b'  3a 1b'  2b 0a'  3b 1a'  2b'     3b' 2a' 3a'
    stage 1        0a  1a  0b 0b'  1b 1b'  2a 0a'  3a 1a'  2b 2b'  3b 3b'  2a' 3a'
    loops      f---------  fbe-----------  fb------------  fbe-----------  b----------

What is before and behind the layers runs in each stage, on its own microbatch: only that of the first and of the last
stage counts. What is before them runs in both directions, and so are residuals made again that nothing which arrives in
a stage is a part of.
"""
