"""Multi-head and multi-query attention as the papers and tutorials write them: slow, plain, and each checked against all the others.

These are oracles and teaching, never on the serving path; MHA lives here and nowhere else. `masking` holds what all of them share,
`shazeer` the paper's einsum programs, `heads` one projection per query head, `fused` fused projections with a broadcast head axis,
`convert` moves weights between them and the serving layer.

Shape letters, as in the paper: b batch, n queries, m memory (keys), d model size, h heads, k key size, v value size.
"""
