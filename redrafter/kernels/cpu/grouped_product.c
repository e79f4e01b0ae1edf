// Products of float32 inputs with a grouped weight of 4 or 8 bits, in the layout of `GroupedWeight`.
//
// Four rows of the weight are multiplied at once with a few tokens, whose sums stay in registers. The weight is
// dequantised in registers if all tokens fit, and else in a buffer, once for all tokens. Each sum is a vector of sums
// along the input features, so that its bits depend neither on the number of tokens nor on that of threads.
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// `BLOCK` is the number of tokens whose sums stay in registers, `DIRECT` the most for which the weight does too.
#if defined(__AVX512DQ__)
#define LANES 16
#define BLOCK 6
#define DIRECT(bits) 4
#else
#define LANES 8
#define BLOCK 3
#define DIRECT(bits) ((bits) == 4 ? 1 : BLOCK)
#endif
#define ROWS 4
#define WIDE 32 // bits of a weight that is dequantised already
#define INLINE static inline __attribute__((always_inline))
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
    float *out;
    size_t tokens, features, inner, group;
    int bits, wide_scale, wide_minimum, parallel; // `wide` numbers are float32, others float16
};

struct rows { // of a weight: codes or float32 numbers, and float32 scales and minima of each group
    const char *codes;
    const float *scale, *minimum;
    size_t inner, group;
};

#if defined(__AVX512DQ__)
INLINE ints widen(const char *p) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE ints widen_unsigned(const char *p) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
#elif defined(__AVX2__)
INLINE ints widen(const char *p) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE ints widen_unsigned(const char *p) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
#else
typedef int8_t chars __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE ints widen(const char *p) { return __builtin_convertvector(*(const chars *)p, ints); }
INLINE ints widen_unsigned(const char *p) { return __builtin_convertvector(*(const bytes *)p, ints); }
#endif

INLINE size_t unit_of(int bits) { return bits == 4 ? 32 : 16; } // features that are dequantised in one iteration

// Dequantise vector `k` of a unit.
INLINE vec dequantize(int bits, size_t k, const char *codes, vec scale, vec minimum) {
    size_t at = k * LANES;
    if (bits == WIDE)
        return *(const loose_vec *)(codes + 4 * at);
    if (bits == 8)
        return __builtin_convertvector(widen(codes + at), vec) * scale + minimum;
    ints pair = widen_unsigned(codes + at % 16);
#if defined(__AVX512DQ__)
    // `scale` is a table of all 16 weights here, of which the instruction reads the lowest four bits of an index.
    return (vec)_mm512_permutexvar_ps((__m512i)(at < 16 ? pair : pair >> 4), (__m512)scale);
#else
    return __builtin_convertvector(at < 16 ? pair & 15 : pair >> 4, vec) * scale + minimum;
#endif
}

// Store the totals of four vectors, plus the bias.
INLINE void store_totals(const vec *sum, const float *bias, float *out) {
#if defined(__AVX2__)
    __m256 half[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
#if defined(__AVX512DQ__)
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

INLINE void read_scales(int bits, int has_minimum, const struct rows *w, size_t g, vec *scale, vec *minimum) {
    size_t groups = w->inner / w->group;
    UNROLL for (size_t r = 0; r < ROWS; r++) {
        minimum[r] = (has_minimum ? w->minimum[r * groups + g] : 0) - (vec){0};
        scale[r] = (bits == WIDE ? 1 : w->scale[r * groups + g]) - (vec){0};
#if defined(__AVX512DQ__)
        if (bits == 4)
            scale[r] = (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * scale[r] + minimum[r];
#endif
    }
}

// Prefetch the codes of the next four rows, which the hardware does not, as it follows each row.
INLINE void prefetch_next(const char *codes, size_t stride) {
    UNROLL for (size_t r = 0; r < ROWS; r++) __builtin_prefetch(codes + (ROWS + r) * stride);
}

// Multiply four rows with at most `BLOCK` tokens. All arguments up to `has_minimum` are constants.
INLINE void multiply(size_t tokens, int bits, int has_minimum, const struct rows *w, const float *x, const float *bias,
                     float *out, size_t features) {
    vec sum[BLOCK][ROWS], scale[ROWS], minimum[ROWS];
    UNROLL for (size_t t = 0; t < tokens; t++) UNROLL for (size_t r = 0; r < ROWS; r++) sum[t][r] = (vec){0};
    const char *codes = w->codes;
    const size_t unit = unit_of(bits), step = unit * bits / 8, inner = w->inner, stride = inner * bits / 8;
    for (size_t g = 0; g < inner / w->group; g++) {
        read_scales(bits, has_minimum, w, g, scale, minimum);
        for (const float *end = x + w->group; x != end; x += unit, codes += step) {
            if (bits != WIDE)
                prefetch_next(codes, stride);
            UNROLL for (size_t k = 0; k < unit / LANES; k++) UNROLL for (size_t r = 0; r < ROWS; r++) {
                vec v = dequantize(bits, k, codes + r * stride, scale[r], minimum[r]);
                UNROLL for (size_t t = 0; t < tokens; t++)
                    sum[t][r] += v * *(const loose_vec *)(x + t * inner + k * LANES);
            }
        }
    }
    UNROLL for (size_t t = 0; t < tokens; t++) store_totals(sum[t], bias, out + t * features);
}

// Dequantise four rows to `wide [4, D]`.
INLINE void widen_rows(int bits, int has_minimum, const struct rows *w, float *wide) {
    vec scale[ROWS], minimum[ROWS];
    const char *codes = w->codes;
    const size_t unit = unit_of(bits), step = unit * bits / 8, inner = w->inner, stride = inner * bits / 8;
    for (size_t g = 0; g < inner / w->group; g++) {
        read_scales(bits, has_minimum, w, g, scale, minimum);
        for (const float *end = wide + w->group; wide != end; wide += unit, codes += step) {
            prefetch_next(codes, stride);
            UNROLL for (size_t k = 0; k < unit / LANES; k++) UNROLL for (size_t r = 0; r < ROWS; r++)
                *(loose_vec *)(wide + r * inner + k * LANES) =
                    dequantize(bits, k, codes + r * stride, scale[r], minimum[r]);
        }
    }
}

INLINE void multiply_block(size_t tokens, int bits, int has_minimum, const struct rows *w, const float *x,
                           const float *bias, float *out, size_t features) {
#define CASE(n) if (n <= BLOCK && tokens == n) return multiply(n <= BLOCK ? n : 1, bits, has_minimum, w, x, bias, out, features);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
}

// Convert `count` numbers, a multiple of 4, to float32.
static const float *to_float32(const char *numbers, int is_wide, size_t first, size_t count, float *buffer) {
    if (!numbers || is_wide)
        return numbers ? (const float *)numbers + first : NULL;
#if defined(__AVX2__)
    const __m128i *half = (const __m128i *)((const uint16_t *)numbers + first);
    for (size_t i = 0; i < count; i += 8)
        if (i + 8 <= count)
            _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128(half + i / 8)));
        else
            _mm_storeu_ps(buffer + i, _mm_cvtph_ps(_mm_loadl_epi64(half + i / 8)));
#else
    for (size_t i = 0; i < count; i++) buffer[i] = ((const _Float16 *)numbers)[first + i];
#endif
    return buffer;
}

INLINE void multiply_features(int bits, int has_minimum, const struct product *p, size_t first, size_t end) {
    const size_t inner = p->inner, groups = inner / p->group;
    float scale[ROWS * groups], minimum[ROWS * groups], wide[bits != WIDE && p->tokens > DIRECT(bits) ? ROWS * inner : 1];
    const size_t blocks = p->x ? (p->tokens + BLOCK - 1) / BLOCK : 1, size = (p->tokens + blocks - 1) / blocks;
    for (size_t f = first; f < end; f += ROWS) {
        if (f + ROWS > p->features) // the last rows, some of them a second time
            f = p->features - ROWS;
        const float *bias = p->bias ? p->bias + f : NULL;
        struct rows rows = {p->codes + f * inner * bits / 8,
                            to_float32(p->scale, p->wide_scale, f * groups, ROWS * groups, scale),
                            to_float32(p->minimum, p->wide_minimum, f * groups, ROWS * groups, minimum), inner, p->group};
        if (!p->x) {
            widen_rows(bits, has_minimum, &rows, p->out + f * inner);
            continue;
        }
        if (p->tokens <= DIRECT(bits)) {
            multiply_block(p->tokens, bits, has_minimum, &rows, p->x, bias, p->out + f, p->features);
            continue;
        }
        if (bits != WIDE) {
            widen_rows(bits, has_minimum, &rows, wide);
            rows.codes = (const char *)wide, rows.group = inner;
        }
        for (size_t t = 0; t < p->tokens; t += size)
            multiply_block(p->tokens - t < size ? p->tokens - t : size, WIDE, 0, &rows, p->x + t * inner, bias,
                           p->out + t * p->features + f, p->features);
    }
}

// Return the first output feature of a thread, which has whole blocks up to the next thread's.
static size_t first_of(size_t features, size_t index, size_t count) {
    size_t first = (features + ROWS - 1) / ROWS * index / count * ROWS;
    return first < features ? first : features;
}

static void multiply_part(const struct product *p, size_t index, size_t count) {
    size_t first = first_of(p->features, index, count), end = first_of(p->features, index + 1, count);
    if (p->bits == WIDE)
        multiply_features(WIDE, 0, p, first, end);
    else if (p->bits == 4)
        p->minimum ? multiply_features(4, 1, p, first, end) : multiply_features(4, 0, p, first, end);
    else
        p->minimum ? multiply_features(8, 1, p, first, end) : multiply_features(8, 0, p, first, end);
}

static void multiply_share(void *argument) {
    const struct product *p = argument;
    multiply_part(p, p->parallel ? omp_get_thread_num() : 0, p->parallel ? omp_get_num_threads() : 1);
}

void grouped_product(const float *x, const char *codes, const char *scale, const char *minimum, const float *bias,
                     float *out, size_t tokens, size_t features, size_t inner, size_t group, int bits, int wide_scale,
                     int wide_minimum, int threads) {
    struct product p = {x, bias, codes, scale, minimum, out, tokens, features, inner, group, bits, wide_scale, wide_minimum,
                        threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads};
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
