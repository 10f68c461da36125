"""The same values in a form that XLA makes better programs of.

`windows` mends what it partitions wrongly, `own_examples` what it does not partition, `layouts` what it lays out badly
on TPUs, and `row_lookups` what it has in memory there.
"""
