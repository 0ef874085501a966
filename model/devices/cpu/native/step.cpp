// The layers of a decoder for the tokens of one step, in one call: operations that model/devices/cpu/program.py recorded, one after another.
//
// What an operation does to a token alone (norms, additions, rotation, writing keys and values, preparing rows for a product) is computed
// token by token, for as many operations as follow one another; products and attention are shared out by columns and by query rows.
// Invariant: a token's result depends on its own sequence alone, bit for bit. It knows nothing of modules, and allocates no activation.

#include "attention.h"
#include "product.h"

enum Kind { NORM, ADD, MULTIPLY, ROTATE, GATE, PRODUCT, ATTEND };

// Columns of an activation of T tokens: token t has those from memory[base * T + width * t + first] on.
struct Columns {
    int64_t base, width, first;
};

// One operation; program.py has the same fields. Those that a kind does not use are 0.
struct Operation {
    int64_t kind;
    Columns inputs[3], output;  // Of width 0 where there is none.
    int64_t size, heads;  // Columns of a head, or of all where there is one.
    int64_t choice;       // ROTATE: which table; GATE: the activation; ATTEND: the group of layers.
    const void *details;  // NORM: Norm, PRODUCT: Product, ATTEND: Attention.
    float factor;         // ADD: of the second input; MULTIPLY: instead of a second input.
};

// Of a group of layers, with the same spans.
struct Group {
    const Span *spans;
    int64_t num_spans;
};

// Cosines and sines of the step's tokens, [T, pairs].
struct Rotation {
    const float *cosine, *sine;
    int64_t pairs, is_interleaved;
};

struct Step {
    const Operation *operations;
    int64_t num_operations, num_tokens;
    float *memory;
    char *tiles;
    const Group *groups;
    const Rotation *rotations;
};

// An operation with addresses.
struct Bound {
    const Operation *operation;
    Product product;
    Attention attention;
    const std::vector<Part> *parts;
};

struct Segment {
    const Step *step;
    const Bound *begin, *end;
};

static float *at(const Step &step, const Columns &columns) { return step.memory + columns.base * step.num_tokens + columns.first; }

static void compute_token(const Step &step, const Bound &bound, int64_t t) {
    const Operation &op = *bound.operation;
    const auto input = [&](int i) { return at(step, op.inputs[i]) + t * op.inputs[i].width; };
    float *output = at(step, op.output) + t * op.output.width;
    switch (op.kind) {
        case NORM:
            for (int64_t h = 0; h < op.heads; h++) normalise(input(0) + h * op.size, output + h * op.size, op.size, *(const Norm *)op.details);
            break;
        case ADD: add_row(input(0), input(1), output, op.size, op.factor); break;
        case MULTIPLY: multiply_row(input(0), op.inputs[1].width ? input(1) : nullptr, output, op.size, op.factor); break;
        case ROTATE: {
            const Rotation &rotation = step.rotations[op.choice];
            const float *cosine = rotation.cosine + t * rotation.pairs, *sine = rotation.sine + t * rotation.pairs;
            for (int64_t h = 0; h < op.heads; h++)
                rotate_head(input(0) + h * op.size, output + h * op.size, rotation.pairs, cosine, sine, rotation.is_interleaved);
            break;
        }
        case GATE: gate_row(input(0), output, op.size, int(op.choice)); break;
        case PRODUCT: kernel_of(bound.product).prepare(bound.product, step.tiles, t, t + 1); break;
        case ATTEND: write_tokens(bound.attention, t, t + 1); break;
    }
}

static void compute_tokens(const void *work, int64_t begin, int64_t end) {
    const Segment &segment = *(const Segment *)work;
    for (int64_t t = begin; t < end; t++)
        for (const Bound *bound = segment.begin; bound != segment.end; bound++) compute_token(*segment.step, *bound, t);
}

static void compute_panels(const void *work, int64_t begin, int64_t end) {
    const Segment &segment = *(const Segment *)work;
    const Product &product = segment.begin->product;
    kernel_of(product).panels(product, segment.step->tiles, begin, end);
}

static void compute_parts(const void *work, int64_t begin, int64_t end) {
    const Bound &bound = *((const Segment *)work)->begin;
    attend_parts(bound.attention, bound.parts->data() + begin, bound.parts->data() + end);
}

static Bound bind(const Step &step, const Operation &op, std::vector<std::vector<Part>> &parts, int64_t num_threads) {
    Bound bound = {&op, {}, {}, nullptr};
    if (op.kind == PRODUCT) {
        Product &p = bound.product = *(const Product *)op.details;
        p.x = at(step, op.inputs[0]), p.x_stride = op.inputs[0].width, p.rows = step.num_tokens;
        p.y = at(step, op.output), p.y_stride = op.output.width;
    }
    if (op.kind == ATTEND) {
        Attention &a = bound.attention = *(const Attention *)op.details;
        a.queries = at(step, op.inputs[0]), a.query_stride = op.inputs[0].width;
        if (op.inputs[1].width) a.new_keys = at(step, op.inputs[1]);
        a.key_stride = op.inputs[1].width;
        a.new_values = at(step, op.inputs[2]), a.value_stride = op.inputs[2].width;
        a.outputs = at(step, op.output);
        a.spans = step.groups[op.choice].spans, a.num_spans = step.groups[op.choice].num_spans, a.num_tokens = step.num_tokens;
        // All layers of a group share out their rows in the same way.
        if (int64_t(parts.size()) <= op.choice) parts.resize(op.choice + 1);
        if (parts[op.choice].empty()) parts[op.choice] = parts_of(a, num_threads);
    }
    return bound;
}

extern "C" void compute_step(const Step *step, int64_t num_threads) {
    static thread_local std::vector<Bound> bounds;
    static thread_local std::vector<Segment> segments;
    static thread_local std::vector<Phase> phases;
    std::vector<std::vector<Part>> parts;
    bounds.clear(), segments.clear(), phases.clear();
    for (int64_t i = 0; i < step->num_operations; i++) bounds.push_back(bind(*step, step->operations[i], parts, num_threads));
    segments.reserve(2 * bounds.size());  // Phases point to them.
    const auto add = [&](void (*compute)(const void *, int64_t, int64_t), const Bound *begin, const Bound *end, int64_t items) {
        segments.push_back({step, begin, end});
        phases.push_back({compute, &segments.back(), items});
    };
    const Bound *begin = bounds.data(), *last = begin + bounds.size();
    for (Bound *bound = bounds.data(); bound != last; bound++) {
        const Operation &op = *bound->operation;
        const bool is_shared_out = op.kind == PRODUCT || op.kind == ATTEND;
        if (is_shared_out || bound + 1 == last) {
            add(compute_tokens, begin, bound + 1, step->num_tokens);
            begin = bound + 1;
        }
        if (op.kind == PRODUCT) add(compute_panels, bound, bound + 1, num_panels(bound->product));
        if (op.kind == ATTEND) {
            bound->parts = &parts[op.choice];
            add(compute_parts, bound, bound + 1, int64_t(bound->parts->size()));
        }
    }
    compute_phases(phases.data(), int64_t(phases.size()), num_threads);
}
