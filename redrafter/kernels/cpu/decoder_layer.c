// Whole decoder layers over few tokens, for the classes of `decoder_layer.py`: one call instead of forty of torch's for each.
//
// The threads compute one stage after the other: norm and products, rope and the cache, attention, and the MLP. The bits
// of a token do not depend on the other tokens, except for those that it sees, nor on the number of threads.
#include "grouped_product.c"

#define MOST_AHEAD (1 << 18) // bytes of keys, and of values, half of a core's cache
#define PART 4 // vectors of a value whose sums stay in registers

extern void GOMP_barrier(void) __attribute__((weak));

struct linear {
    const char *codes, *scale, *minimum;
    const float *bias;
    size_t features, inner, group;
    int bits, wide_scale, wide_minimum;
};

struct layer {
    struct linear query, key, value, output, gate, up, down;
    const float *before_attention, *before_mlp, *of_queries, *of_keys; // weights of norms; the last two may be NULL
    size_t heads, group, width; // of keys, the query heads of each, and numbers of a head
    float epsilon, offset, scale;
};

struct forward {
    const struct layer *const *layers;
    float *const *pools; // the keys and the values of each layer
    float *const *outs;  // the output of each layer, which may be one for several
    const float *x, *cos, *sin, *mask; // `[B, M, D]`, `[B or 1, M, width]`, `[B or 1, 1, M, S]` or NULL
    float *buffer, *sums; // `sums [B, M]` of keys and values that are not finite, or NULL
    const int64_t *slots; // of the cache, for each token
    size_t depth, rows, nodes, window, capacity, rope_row, mask_row, mask_node; // distances in numbers
    int threads;
    const struct layer *layer; // the one that is computed, its keys and values, and its output
    float *keys, *values, *out;
};

INLINE vec choose(ints condition, vec yes, vec no) { return (vec)((condition & (ints)yes) | (~condition & (ints)no)); }

// Compute the exponential of numbers up to 88: within 2 units in the last place, 0 below -87, NaN of NaN.
INLINE vec exponential(vec x) {
    const vec shift = 12582912.0f - (vec){0}; // at which float32 has no fractions
    vec n = x * 1.44269504f + shift;
    ints power = ((ints)n - (ints)shift) << 23;
    n -= shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return choose(x < -87.0f, (vec){0}, (vec)((ints)y + power));
}

static void multiply_linear(const struct linear *w, const float *x, float *out, size_t tokens, size_t index, size_t count,
                            const float *ahead, size_t size_ahead) {
    struct product p = {x, w->bias, w->codes, w->scale, w->minimum, (const char *)ahead, out, tokens, w->features, w->inner,
                        w->group, size_ahead, w->bits, w->wide_scale, w->wide_minimum, 0};
    multiply_part(&p, index, count);
}

// Add two products, one thread's share of the features.
static void add_share(const float *x, const float *y, float *out, size_t tokens, size_t features, size_t index, size_t count) {
    size_t end = first_of(features, index + 1, count);
    for (size_t t = 0; t < tokens; t++)
        for (size_t f = first_of(features, index, count); f < end; f++) 
            out[t * features + f] = x[t * features + f] + y[t * features + f];
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(choose(x < -87.0f, 87.0f - (vec){0}, -x))); }

// Multiply one thread's share of the gate, `[T, features]`, with the other product.
static void gate_share(float *gate, const float *up, size_t tokens, size_t features, size_t index, size_t count) {
    size_t first = first_of(features, index, count), size = first_of(features, index + 1, count) - first;
    for (size_t t = 0; t < tokens; t++) {
        float *g = gate + t * features + first;
        const float *u = up + t * features + first;
        size_t i = 0;
        for (; i + LANES <= size; i += LANES)
            *(loose_vec *)(g + i) = silu(*(loose_vec *)(g + i)) * *(const loose_vec *)(u + i);
        for (; i < size; i++) g[i] = silu(g[i] - (vec){0})[0] * u[i];
    }
}

// Rotate a head by its position, after a norm where there is one.
INLINE void rotate(const float *x, const float *norm, const struct layer *l, const float *cos, const float *sin, float *out) {
    const size_t width = l->width, half = width / 2;
    float normed[width];
    if (norm) {
        rms_norm(x, norm, normed, 1, width, l->epsilon, l->offset);
        x = normed;
    }
    for (size_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
}

// Store a key or value, with zeros in place of numbers that are not finite where drafts must not spread these.
INLINE void store_finite(const float *x, float *out, size_t width, float *sum) {
    int lost = 0;
    for (size_t i = 0; i < width; i++) {
        int finite = x[i] - x[i] == 0 || !sum;
        lost |= !finite;
        out[i] = finite ? x[i] : 0;
    }
    if (lost)
        *sum = __builtin_nanf("");
}

static void rotate_share(const struct forward *f, const float *query, const float *key, const float *value, float *stacked,
                         size_t index, size_t count) {
    const struct layer *l = f->layer;
    const size_t width = l->width, group = l->group, units = f->rows * f->nodes * l->heads;
    float rotated[width];
    for (size_t unit = units * index / count; unit < units * (index + 1) / count; unit++) {
        const size_t head = unit % l->heads, token = unit / l->heads, row = token / f->nodes, node = token % f->nodes;
        const float *cos = f->cos + row * f->rope_row + node * width, *sin = f->sin + row * f->rope_row + node * width;
        for (size_t g = 0; g < group; g++)
            rotate(query + (unit * group + g) * width, l->of_queries, l, cos, sin,
                   stacked + (((row * l->heads + head) * group + g) * f->nodes + node) * width);
        rotate(key + unit * width, l->of_keys, l, cos, sin, rotated);
        const size_t at = (f->slots[token] * l->heads + head) * width;
        float *sum = f->sums ? f->sums + token : NULL;
        store_finite(rotated, f->keys + at, width, sum);
        store_finite(value + unit * width, f->values + at, width, sum);
    }
}

// Turn the scores of one query into weights, and return their sum. `size` is a multiple of `LANES`.
INLINE float weigh(float *scores, const float *mask, size_t slots, size_t size, float scale) {
    if (mask)
        for (size_t s = 0; s < slots; s++) scores[s] = scores[s] * scale + mask[s];
    else
        for (size_t s = 0; s < slots; s++) scores[s] *= scale;
    for (size_t s = slots; s < size; s++) scores[s] = -__builtin_inff();
    vec top = *(loose_vec *)scores, sum = {0};
    for (size_t s = LANES; s < size; s += LANES) {
        vec v = *(loose_vec *)(scores + s);
        top = choose(v > top, v, top);
    }
    float highest = top[0], total = 0;
    for (int l = 1; l < LANES; l++) highest = top[l] > highest ? top[l] : highest;
    for (size_t s = 0; s < size; s += LANES) {
        vec v = exponential(*(loose_vec *)(scores + s) - highest);
        *(loose_vec *)(scores + s) = v;
        sum += v;
    }
    for (int l = 0; l < LANES; l++) total += sum[l];
    return total;
}

INLINE void add_values(size_t queries, size_t part, const float *value, size_t stride, const float *weights, size_t slots,
                       size_t size, const float *total, float *const *out) {
    vec sum[BLOCK][PART];
    UNROLL for (size_t t = 0; t < queries; t++) UNROLL for (size_t j = 0; j < part; j++) sum[t][j] = (vec){0};
    for (size_t s = 0; s < slots; s++, value += stride)
        UNROLL for (size_t j = 0; j < part; j++) {
            vec v = *(const loose_vec *)(value + j * LANES);
            UNROLL for (size_t t = 0; t < queries; t++) sum[t][j] += weights[t * size + s] * v;
        }
    UNROLL for (size_t t = 0; t < queries; t++) UNROLL for (size_t j = 0; j < part; j++)
        *(loose_vec *)(out[t] + j * LANES) = sum[t][j] / total[t];
}

// Attend with a few of the queries that share a head of keys: the products with four keys at once, then those with values.
INLINE void attend(size_t queries, const struct forward *f, const float *query, float *attended, size_t row, size_t head,
                   size_t first, size_t slots, float *scores, size_t size) {
    const struct layer *l = f->layer;
    const size_t width = l->width, all = l->group * f->nodes, stride = l->heads * width;
    const size_t base = row * f->capacity * stride + head * width;
    const float *key = f->keys + base, *value = f->values + base;
    query += ((row * l->heads + head) * all + first) * width;
    for (size_t s = 0; s < slots; s += ROWS) {
        if (s + ROWS > slots) // the last slots, some of them a second time
            s = slots > ROWS ? slots - ROWS : 0;
        vec sum[BLOCK][ROWS];
        UNROLL for (size_t t = 0; t < queries; t++) UNROLL for (size_t r = 0; r < ROWS; r++) sum[t][r] = (vec){0};
        for (size_t i = 0; i < width; i += LANES)
            UNROLL for (size_t r = 0; r < ROWS; r++) {
                vec k = *(const loose_vec *)(key + (s + r) * stride + i);
                UNROLL for (size_t t = 0; t < queries; t++) sum[t][r] += k * *(const loose_vec *)(query + t * width + i);
            }
        UNROLL for (size_t t = 0; t < queries; t++) store_totals(sum[t], NULL, scores + t * size + s);
    }
    float total[BLOCK], *out[BLOCK];
    for (size_t t = 0; t < queries; t++) {
        const size_t node = (first + t) % f->nodes, of_group = (first + t) / f->nodes;
        const float *mask = f->mask ? f->mask + row * f->mask_row + node * f->mask_node : NULL;
        total[t] = weigh(scores + t * size, mask, slots, size, l->scale);
        out[t] = attended + ((row * f->nodes + node) * l->heads * l->group + head * l->group + of_group) * width;
    }
    size_t i = 0;
    for (; i + PART * LANES <= width; i += PART * LANES) {
        add_values(queries, PART, value + i, stride, scores, slots, size, total, out);
        for (size_t t = 0; t < queries; t++) out[t] += PART * LANES;
    }
    for (; i < width; i += LANES) {
        add_values(queries, 1, value + i, stride, scores, slots, size, total, out);
        for (size_t t = 0; t < queries; t++) out[t] += LANES;
    }
}

// Return the slots of a row without the last ones that no node sees, whose weights would be 0.
static size_t seen_slots(const struct forward *f, size_t row) {
    for (size_t slots = f->window; f->mask && slots > 1; slots--)
        for (size_t node = 0; node < f->nodes; node++)
            if (f->mask[row * f->mask_row + node * f->mask_node + slots - 1] > -3e38f)
                return slots;
    return f->mask ? 1 : f->window;
}

static void attend_share(const struct forward *f, const float *query, float *attended, size_t index, size_t count) {
    const size_t all = f->layer->group * f->nodes, blocks = (all + BLOCK - 1) / BLOCK, heads = f->layer->heads;
    const size_t tasks = f->rows * heads * blocks;
    float scores[BLOCK * (f->window + ROWS + LANES)];
    for (size_t task = tasks * index / count; task < tasks * (index + 1) / count; task++) {
        size_t first = task % blocks * BLOCK, head = task / blocks % heads, row = task / blocks / heads;
        size_t slots = seen_slots(f, row), size = ((slots > ROWS ? slots : ROWS) + LANES - 1) / LANES * LANES;
        size_t queries = all - first < BLOCK ? all - first : BLOCK;
#undef CASE
#define CASE(n) if (n <= BLOCK && queries == n) attend(n <= BLOCK ? n : 1, f, query, attended, row, head, first, slots, scores, size);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
}

static void norm_share(const float *x, const float *weight, float *out, const struct forward *f, size_t index, size_t count) {
    const size_t width = f->layer->query.inner;
    for (size_t t = index; t < f->rows * f->nodes; t += count)
        rms_norm(x + t * width, weight, out + t * width, 1, width, f->layer->epsilon, f->layer->offset);
}

#define WAIT if (count > 1) GOMP_barrier()

static void compute_layer(const struct forward *f, size_t index, size_t count) {
    const struct layer *l = f->layer;
    const size_t tokens = f->rows * f->nodes, size = l->query.inner, wide = l->gate.features;
    const size_t queries = tokens * l->query.features, keys = tokens * l->key.features;
    float *normed = f->buffer, *query = normed + tokens * size, *key = query + queries, *value = key + keys;
    float *stacked = value + keys, *gate = stacked + queries, *up = gate + tokens * wide;
    norm_share(f->x, l->before_attention, normed, f, index, count);
    WAIT;
    // Attention waits for memory and products do not, so keys and values are fetched during these.
    const size_t stored = 4 * seen_slots(f, 0) * l->key.features, ahead = stored < MOST_AHEAD ? stored : MOST_AHEAD;
    multiply_linear(&l->query, normed, query, tokens, index, count, f->keys, ahead);
    multiply_linear(&l->key, normed, key, tokens, index, count, f->values, ahead / 2);
    multiply_linear(&l->value, normed, value, tokens, index, count, f->values + ahead / 8, ahead / 2);
    WAIT;
    rotate_share(f, query, key, value, stacked, index, count);
    WAIT;
    attend_share(f, stacked, query, index, count);
    WAIT;
    multiply_linear(&l->output, query, normed, tokens, index, count, NULL, 0);
    add_share(f->x, normed, f->out, tokens, size, index, count);
    WAIT;
    norm_share(f->out, l->before_mlp, normed, f, index, count);
    WAIT;
    multiply_linear(&l->gate, normed, gate, tokens, index, count, NULL, 0);
    multiply_linear(&l->up, normed, up, tokens, index, count, NULL, 0);
    gate_share(gate, up, tokens, wide, index, count);
    WAIT;
    multiply_linear(&l->down, gate, normed, tokens, index, count, NULL, 0);
    add_share(f->out, normed, f->out, tokens, size, index, count);
    WAIT;
}

static void compute_share(void *forward) {
    struct forward f = *(const struct forward *)forward;
    const size_t count = f.threads > 1 ? omp_get_num_threads() : 1, index = f.threads > 1 ? omp_get_thread_num() : 0;
    for (size_t i = 0; i < f.depth; i++, f.x = f.out) {
        f.layer = f.layers[i], f.keys = f.pools[2 * i], f.values = f.pools[2 * i + 1], f.out = f.outs[i];
        compute_layer(&f, index, count);
    }
}

void decoder_layer(struct forward *f) {
    if (f->threads > 1 && GOMP_parallel && GOMP_barrier && omp_get_thread_num && omp_get_num_threads)
        GOMP_parallel(compute_share, f, f->threads, 0);
    else {
        f->threads = 1;
        compute_share(f);
    }
}
