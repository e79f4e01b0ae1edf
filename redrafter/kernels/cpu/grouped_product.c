// Products of float32 inputs with a grouped weight of 4 or 8 bits, in the layout of `GroupedWeight`.
//
// Four rows of the weight are multiplied at once with a few tokens, whose sums stay in registers. The weight is
// dequantised in registers if all tokens fit, and else in a buffer, once for all tokens. Each sum is a vector of sums
// along the input features, so that its bits depend neither on the number of tokens nor on that of threads.
#include <stddef.h>
#include <stdint.h>
#if defined(LANES) // for tests: vectors of that many numbers, by the compiler alone
#elif defined(__AVX512DQ__)
#define WITH_AVX512
#define WITH_AVX2
#define LANES 16
#else
#define LANES 8
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WITH_AVX2
#endif
#endif
#if defined(WITH_AVX2)
#include <immintrin.h>
#endif

// `DIRECT` is the most tokens for which the weight is dequantised in registers, for `AT_ONCE` rows, and `BLOCK` the number
// of tokens of which the sums with four rows stay in registers else.
#if LANES == 16
#define BLOCK 6
#define DIRECT 6
#define AT_ONCE(tokens) ((tokens) < 5 ? 4 : 2)
#else
#define BLOCK 3
#define DIRECT 6
#define AT_ONCE(tokens) ((tokens) < 3 ? 4 : 2)
#endif
#define MOST (BLOCK > DIRECT ? BLOCK : DIRECT)
#define ROWS 4
#define WIDE 32   // bits of a weight in float32
#define PACKED 64 // added to the bits of a weight that is dequantised already, four rows of which the vectors alternate
#define GROUPS 4112 // more than a row has, and no power of two, so that the rows' scales are in different sets of the cache
#define INLINE static inline __attribute__((always_inline))
#define LINE 64                // bytes of a line of the cache
#define MOST_INPUTS (1 << 18) // numbers of inputs that a thread has on its stack
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

// Of torch's own OpenMP, which Python has loaded, so that there is one pool of threads.
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

struct product {
    const float *x, *bias; // without `x`, the weight is dequantised to `out`
    const char *codes, *scale, *minimum;
    const char *ahead; // `size_ahead` bytes that are read after the product, and fetched to the cache during it
    float *out;
    size_t tokens, features, inner, group, size_ahead;
    int bits, wide_scale, wide_minimum, parallel; // `wide` numbers are float32, others float16
};

struct rows { // of a weight: codes or float32 numbers, and float32 scales and minima, each row's `GROUPS` after the one before
    const char *codes;
    const float *scale, *minimum;
    size_t inner, group;
};

#if defined(WITH_AVX512)
INLINE ints widen(const char *p) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE ints widen_unsigned(const char *p) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
#elif defined(WITH_AVX2)
INLINE ints widen(const char *p) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE ints widen_unsigned(const char *p) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
#else
typedef int8_t chars __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE ints widen(const char *p) { return __builtin_convertvector(*(const chars *)p, ints); }
INLINE ints widen_unsigned(const char *p) { return __builtin_convertvector(*(const bytes *)p, ints); }
#endif

INLINE size_t unit_of(int bits) { return bits % PACKED == 4 ? 32 : 16; } // features that are dequantised in one iteration

// Return which vector of a unit comes in place `k`: those of the same bytes of codes follow each other.
INLINE size_t in_order(int bits, size_t k) { return LANES == 8 && bits % PACKED == 4 ? k % 2 * 2 + k / 2 : k; }

// Dequantise vector `k` of a unit.
INLINE vec dequantize(int bits, size_t k, const char *codes, vec scale, vec minimum) {
    size_t at = k * LANES;
    if (bits == 8)
        return __builtin_convertvector(widen(codes + at), vec) * scale + minimum;
    ints pair = widen_unsigned(codes + at % 16);
#if defined(WITH_AVX512)
    // `scale` is a table of all 16 weights here, of which the instruction reads the lowest four bits of an index.
    return (vec)_mm512_permutexvar_ps((__m512i)(at < 16 ? pair : pair >> 4), (__m512)scale);
#else
    return __builtin_convertvector(at < 16 ? pair & 15 : pair >> 4, vec) * scale + minimum;
#endif
}

// Store the totals of four vectors, plus the bias.
INLINE void store_totals(const vec *sum, const float *bias, float *out) {
#if defined(WITH_AVX2)
    __m256 half[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
#if defined(WITH_AVX512)
        half[r] = _mm512_castps512_ps256((__m512)sum[r]) + _mm512_extractf32x8_ps((__m512)sum[r], 1);
#else
        half[r] = (__m256)sum[r];
#endif
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    __m128 totals = _mm256_castps256_ps128(pairs) + _mm256_extractf128_ps(pairs, 1);
    _mm_storeu_ps(out, totals + (bias ? _mm_loadu_ps(bias) : _mm_setzero_ps()));
#else
    for (int r = 0; r < ROWS; r++) {
        float total = 0;
        UNROLL for (int l = 0; l < LANES; l++) total += sum[r][l];
        out[r] = total + (bias ? bias[r] : 0);
    }
#endif
}

INLINE void read_scale(int bits, int has_minimum, const struct rows *w, size_t r, size_t g, vec *scale, vec *minimum) {
    const float by = w->scale[r * GROUPS + g];
    *minimum = (has_minimum ? w->minimum[r * GROUPS + g] : bits == 4 ? -8 * by : 0) - (vec){0};
    *scale = by - (vec){0};
#if defined(WITH_AVX512)
    if (bits == 4)
        *scale = (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * *scale + *minimum;
#endif
}

// Add the product of `v` with a vector in memory, or in a register. In C, the compiler would read vectors early, and spill.
#if defined(WITH_AVX2)
#define ADD_READ(sum, v, p) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(v), "m"(*(const loose_vec *)(p)))
#define ADD(sum, v, x) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(v), "v"(x))
#else
#define ADD_READ(sum, v, p) sum += v * *(const loose_vec *)(p)
#define ADD(sum, v, x) sum += v * x
#endif

// Compute the products of `rows` rows with a few tokens. All arguments up to `has_minimum` are constants.
INLINE void sum_products(size_t tokens, size_t rows, int bits, int has_minimum, const struct rows *weight, const float *x,
                         vec (*sum)[ROWS]) {
    vec total[MOST][ROWS];
    const struct rows w = *weight;
    const size_t unit = unit_of(bits), vectors = unit / LANES, stride = w.inner * bits / 8;
    const char *codes = w.codes, *next = codes + ROWS * stride; // the hardware follows each row, and reads no next ones
    UNROLL for (size_t t = 0; t < tokens; t++) UNROLL for (size_t r = 0; r < rows; r++) total[t][r] = (vec){0};
    if (bits >= WIDE) {
        const size_t row = 4 * (bits >= PACKED ? LANES : w.inner), step = 4 * LANES * (bits >= PACKED ? ROWS : 1);
        for (const float *end = x + w.inner * tokens; x != end; x += unit * tokens)
            UNROLL for (size_t k = 0; k < vectors; k++, codes += step) {
                vec v[MOST];
                UNROLL for (size_t t = 0; t < tokens; t++)
                    v[t] = *(const loose_vec *)(x + (in_order(bits, k) * tokens + t) * LANES);
                UNROLL for (size_t r = 0; r < rows; r++) {
                    vec number = *(const loose_vec *)(codes + r * row);
                    UNROLL for (size_t t = 0; t < tokens; t++) ADD(total[t][r], number, v[t]);
                }
            }
    } else
        for (size_t g = 0; g < w.inner / w.group; g++)
            for (const float *end = x + w.group * tokens; x != end; x += unit * tokens, codes += unit * bits / 8) {
                __builtin_prefetch(next);
                next += 16 * rows;
                // The scales of all rows stay in registers for one token, and for more those of a row at a time.
                const size_t step = tokens == 1 ? 2 : vectors;
                UNROLL for (size_t first = 0; first < vectors; first += step) UNROLL for (size_t r = 0; r < rows; r++) {
                    vec scale, minimum;
                    read_scale(bits, has_minimum, &w, r, g, &scale, &minimum);
                    UNROLL for (size_t k = first; k < vectors && k < first + step; k++) {
                        const size_t at = in_order(bits, k);
                        vec number = dequantize(bits, at, codes + r * stride, scale, minimum);
                        UNROLL for (size_t t = 0; t < tokens; t++)
                            ADD_READ(total[t][r], number, x + (at * tokens + t) * LANES);
                    }
                }
            }
    UNROLL for (size_t t = 0; t < tokens; t++) UNROLL for (size_t r = 0; r < rows; r++) sum[t][r] = total[t][r];
}

// Each is a function of its own, or the compiler would run out of registers.
typedef void summing(const struct rows *, const float *, vec (*)[ROWS]);
#define ROWS_OF(n, bits) ((bits) >= WIDE ? ROWS : AT_ONCE(n))
#define DEFINE(n, name, bits, has_minimum)                                                                              \
    static __attribute__((noinline)) void name##_##n(const struct rows *w, const float *x, vec (*sum)[ROWS]) {          \
        sum_products(n <= MOST ? n : 1, ROWS_OF(n, bits), bits, has_minimum, w, x, sum);                                \
    }
#define DEFINE_ALL(name, bits, has_minimum)                                                                             \
    DEFINE(1, name, bits, has_minimum) DEFINE(2, name, bits, has_minimum) DEFINE(3, name, bits, has_minimum)            \
    DEFINE(4, name, bits, has_minimum) DEFINE(5, name, bits, has_minimum) DEFINE(6, name, bits, has_minimum)            \
    static summing *const name[] = {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6};
DEFINE_ALL(sum_4, 4, 0)
DEFINE_ALL(sum_4_minimum, 4, 1)
DEFINE_ALL(sum_8, 8, 0)
DEFINE_ALL(sum_8_minimum, 8, 1)
DEFINE_ALL(sum_wide, WIDE, 0)
DEFINE_ALL(sum_packed_4, 4 + PACKED, 0)
DEFINE_ALL(sum_packed_8, 8 + PACKED, 0)

// Multiply four rows with a few tokens.
static void multiply(summing *const *sums, size_t tokens, size_t at_once, int bits, struct rows w, const float *x,
                     const float *bias, float *out, size_t features) {
    vec sum[MOST][ROWS];
    for (size_t r = 0; r < ROWS; r += at_once) {
        sums[tokens - 1](&w, x, (vec(*)[ROWS])&sum[0][r]);
        w.codes += at_once * w.inner * bits / 8, w.scale += at_once * GROUPS, w.minimum += at_once * GROUPS;
    }
    for (size_t t = 0; t < tokens; t++) store_totals(sum[t], bias, out + t * features);
}

// Dequantise four rows, to `[4, D]` or `packed`.
INLINE void widen_rows(int bits, int has_minimum, const struct rows *w, float *wide, int packed) {
    const size_t unit = unit_of(bits), vectors = unit / LANES, stride = w->inner * bits / 8;
    const size_t row = packed ? LANES : w->inner, step = packed ? ROWS * LANES : LANES;
    const char *codes = w->codes, *next = codes + ROWS * stride;
    for (size_t g = 0; g < w->inner / w->group; g++)
        for (const char *end = codes + w->group * bits / 8; codes != end; codes += unit * bits / 8, next += 16 * ROWS) {
            __builtin_prefetch(next);
            UNROLL for (size_t r = 0; r < ROWS; r++) {
                vec scale, minimum;
                read_scale(bits, has_minimum, w, r, g, &scale, &minimum);
                UNROLL for (size_t k = 0; k < vectors; k++) {
                    const size_t at = in_order(bits, k);
                    *(loose_vec *)(wide + r * row + (packed ? k : at) * step) =
                        dequantize(bits, at, codes + r * stride, scale, minimum);
                }
            }
            wide += vectors * step;
        }
}

// Convert the scales or minima of four rows to float32.
static void to_float32(const char *numbers, int is_wide, size_t first, size_t groups, float *out) {
    for (size_t r = 0; numbers && r < ROWS; r++, first += groups, out += GROUPS) {
        const float *wide = (const float *)numbers + first;
        const uint16_t *half = (const uint16_t *)numbers + first;
        size_t i = 0;
        if (is_wide)
            for (; i < groups; i++) out[i] = wide[i];
#if defined(WITH_AVX2)
        for (; i + 8 <= groups; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
        for (; i < groups; i++) out[i] = _cvtsh_ss(half[i]);
#else
        for (; i < groups; i++) out[i] = ((const _Float16 *)half)[i];
#endif
    }
}

// Let the vectors of the same features follow each other in each block of `size` tokens: all are then at constant distances.
static void interleave(const float *x, float *out, size_t tokens, size_t inner, size_t size) {
    for (size_t first = 0; first < tokens; first += size) {
        const size_t count = tokens - first < size ? tokens - first : size;
        for (size_t i = 0; i < inner; i += LANES)
            for (size_t t = first; t < first + count; t++, out += LANES)
                *(loose_vec *)out = *(const loose_vec *)(x + t * inner + i);
    }
}

// Return the first line of the memory ahead that is fetched with a feature: all features fetch equally many.
INLINE size_t first_line(const struct product *p, size_t f) { return p->size_ahead / LINE * f / p->features; }

INLINE void multiply_features(int bits, int has_minimum, summing *const *direct, summing *const *packed,
                              const struct product *p, size_t first, size_t end) {
    const size_t inner = p->inner, groups = inner / p->group, is_direct = bits != WIDE && p->tokens <= DIRECT;
    const size_t most = is_direct ? DIRECT : BLOCK, is_packed = bits != WIDE && !is_direct;
    float scale[ROWS * GROUPS], minimum[ROWS * GROUPS];
    float wide[is_packed ? ROWS * inner + LANES : LANES] ;
    float *aligned = (float *)(((uintptr_t)wide + 4 * LANES - 1) / (4 * LANES) * (4 * LANES));
    const size_t blocks = p->x ? (p->tokens + most - 1) / most : 1, size = (p->tokens + blocks - 1) / blocks;
    float inputs[p->tokens > 1 ? p->tokens * inner + LANES : LANES];
    const float *x = p->tokens > 1 ? (float *)(((uintptr_t)inputs + 4 * LANES - 1) / (4 * LANES) * (4 * LANES)) : p->x;
    if (p->tokens > 1)
        interleave(p->x, (float *)x, p->tokens, inner, size);
    for (size_t f = first; f < end; f += ROWS) {
        if (f + ROWS > p->features) // the last rows, some of them a second time
            f = p->features - ROWS;
        const float *bias = p->bias ? p->bias + f : NULL;
        to_float32(p->scale, p->wide_scale, f * groups, groups, scale);
        to_float32(p->minimum, p->wide_minimum, f * groups, groups, minimum);
        struct rows rows = {p->codes + f * inner * bits / 8, scale, minimum, inner, p->group};
        for (size_t at = first_line(p, f); at < first_line(p, f + ROWS); at++) __builtin_prefetch(p->ahead + at * LINE, 0, 2);
        if (!p->x) {
            widen_rows(bits, has_minimum, &rows, p->out + f * inner, 0);
            continue;
        }
        if (is_packed) {
            widen_rows(bits, has_minimum, &rows, aligned, 1);
            rows.codes = (const char *)aligned;
        }
        for (size_t t = 0; t < p->tokens; t += size) {
            const size_t count = p->tokens - t < size ? p->tokens - t : size;
            multiply(is_packed ? packed : direct, count, is_direct ? AT_ONCE(count) : ROWS, bits, rows, x + t * inner,
                     bias, p->out + t * p->features + f, p->features);
        }
    }
}

// Return the first output feature of a thread, which has whole blocks up to the next thread's.
static size_t first_of(size_t features, size_t index, size_t count) {
    size_t first = (features + ROWS - 1) / ROWS * index / count * ROWS;
    return first < features ? first : features;
}

static void multiply_part(const struct product *whole, size_t index, size_t count) {
    const size_t first = first_of(whole->features, index, count), end = first_of(whole->features, index + 1, count);
    const size_t most = whole->inner < MOST_INPUTS ? MOST_INPUTS / whole->inner : 1;
    struct product p = *whole;
    for (size_t done = 0; done == 0 || done < whole->tokens; done += most, p.x += most * p.inner, p.out += most * p.features) {
        p.tokens = whole->tokens - done < most ? whole->tokens - done : most;
        if (p.bits == WIDE)
            multiply_features(WIDE, 0, sum_wide, NULL, &p, first, end);
        else if (p.bits == 4 && p.minimum)
            multiply_features(4, 1, sum_4_minimum, sum_packed_4, &p, first, end);
        else if (p.bits == 4)
            multiply_features(4, 0, sum_4, sum_packed_4, &p, first, end);
        else if (p.minimum)
            multiply_features(8, 1, sum_8_minimum, sum_packed_8, &p, first, end);
        else
            multiply_features(8, 0, sum_8, sum_packed_8, &p, first, end);
    }
}

static void multiply_share(void *argument) {
    const struct product *p = argument;
    multiply_part(p, p->parallel ? omp_get_thread_num() : 0, p->parallel ? omp_get_num_threads() : 1);
}

void grouped_product(const float *x, const char *codes, const char *scale, const char *minimum, const float *bias,
                     float *out, size_t tokens, size_t features, size_t inner, size_t group, int bits, int wide_scale,
                     int wide_minimum, int threads) {
    struct product p = {x, bias, codes, scale, minimum, NULL, out, tokens, features, inner, group, 0, bits, wide_scale,
                        wide_minimum, threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads};
    if (p.parallel)
        GOMP_parallel(multiply_share, &p, threads, 0);
    else
        multiply_share(&p);
}

// Divide each row by the root of its mean square, and multiply it with `weight + offset`.
void rms_norm(const float *x, const float *weight, float *out, size_t rows, size_t width, float epsilon, float offset) {
    for (size_t row = 0; row < rows; row++, x += width, out += width) {
        vec squares = {0};
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) squares += *(const loose_vec *)(x + i) * *(const loose_vec *)(x + i);
        float total = 0;
        for (int l = 0; l < LANES; l++) total += squares[l];
        for (; i < width; i++) total += x[i] * x[i];
        float inverse = 1 / __builtin_sqrtf(total / width + epsilon);
        for (i = 0; i < width; i++) out[i] = x[i] * inverse * (weight[i] + offset);
    }
}
