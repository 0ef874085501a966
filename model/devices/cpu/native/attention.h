// Attention of some tokens in two parts: each token's key and value are written to their page, then parts of the query rows attend.
#pragma once

#include <cstdint>
#include <vector>

// What one row of the step (some tokens of one sequence) reads and writes; model/devices/cpu/attention.py has the same fields.
struct Span {
    int64_t first_token, num_tokens, num_keys, window;
    int64_t ahead;         // Keys after its own that a token sees, if there are so many.
    const int64_t *pages;  // From the one that holds key 0; those of one stack of layers are page_stride apart.
    int64_t page_stride;
};

struct Attention {
    const float *queries, *new_keys, *new_values;  // [T, H, d], [T, d] and [T, v], with the strides below from a token to the next; no keys
                                                   // where the layer reads those that another has stored
    float *outputs;                                // [T, H, v]
    void *keys, *values;                           // Of page 0 in this layer, page_numbers before those of the next; values may be null.
    const Span *spans;
    int64_t query_stride, key_stride, value_stride, num_tokens, num_spans, stack, num_heads, key_dim, value_dim, page_size, page_numbers, number_type;
    float scale;
    int64_t *sums;  // Of each page: the sum of the numbers in it, their bits as whole numbers; may be null.
};

// Query rows first .. last of a span, of its num_tokens * H.
struct Part {
    const Span *span;
    int64_t first, last;
};

std::vector<Part> parts_of(const Attention &attention, int64_t num_threads);
void write_tokens(const Attention &attention, int64_t begin, int64_t end);
void attend_parts(const Attention &attention, const Part *begin, const Part *end);
