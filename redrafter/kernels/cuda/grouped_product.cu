// Products of a few tokens with grouped weights of 4 and 8 bits, by tensor cores of NVIDIA GPUs from Ampere on.
//
// Codes are small integers, which are exact in 16 bits. So a warp multiplies them as they are with the inputs, in
// float32, and multiplies each block's sum with the block's scale: the weight itself is never rounded. Minima are
// multiplied with the sums of the inputs of a group, by one more product on tensor cores. Without them, 8 is subtracted
// from codes of 4 bits, in the instruction that widens them.
//
// A program has WARPS x 32 output features, whose codes it copies tile by tile to shared memory, one after another.
// It starts to copy them before the previous kernel is done, which they do not depend on. Several programs share the
// input features of a small weight, and then the work of adding up their parts. All orders of sums depend only on the
// sizes of the weight, so that a token has the same bits whatever else is in the forward.
//
// Macros: BITS (4, 8), X, SCALE, MINIMUM, BIAS (0 bfloat16, 1 float16, 2 float32, -1 none), TILES (of 8 tokens), WARPS,
// BLOCKS (of 16 bytes of a row, in a tile: 4, 8), STAGES (tiles in shared memory), PROGRAMS (at least, for which a
// multiprocessor has registers), PER (scales of a row in a tile), WHOLE (1 if tiles are, and scales whole words).

#ifdef __CUDACC_RTC__  // tests define these for a CPU
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Two { u32 x, y; };
struct Four { u32 x, y, z, w; };

#define DEVICE static __device__ __forceinline__

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float number) { return __float_as_uint(number); }
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void copy16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
template <int SIZE> DEVICE void copy_few(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE), "r"(valid ? SIZE : 0) : "memory");
}
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE Four load_matrices(u32 at) {
    Four r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at) : "memory");
    return r;
}
DEVICE u32 load2(u32 at) { u16 r; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(at) : "memory"); return r; }
DEVICE u32 load4(u32 at) { u32 r; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at) : "memory"); return r; }
DEVICE Two load8(u32 at) { Two r; asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(at) : "memory"); return r; }
DEVICE Four load16(u32 at) {
    Four r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at) : "memory");
    return r;
}
DEVICE void store2(u32 at, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)v) : "memory"); }
DEVICE void store4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE void store8(u32 at, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory"); }
DEVICE float2 load_global(const float2* at) {
    float2 r;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(at) : "memory");
    return r;
}
DEVICE int load_count(const int* at) { int r; asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory"); return r; }
DEVICE float from_half(u32 bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)bits)); return r; }
DEVICE u32 to_half(float number) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(number)); return r; }
DEVICE u32 to_bfloat16(float number) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(number)); return r; }
DEVICE u32 to_bfloat16_pair(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 r;
#if X == 1
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#endif
    return r;
}
#if X == 1
#define KIND "f16"
#else
#define KIND "bf16"
#endif
DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_wide(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 permute(u32 a, u32 selector) { return __byte_perm(a, 0, selector); }
DEVICE u32 and_or(u32 a, u32 b, u32 c) { u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
#endif

constexpr int ROWS = 32 * WARPS, THREADS = 32 * WARPS;
constexpr int TILE_BYTES = 16 * BLOCKS;               // of a row
constexpr int UNITS = BLOCKS * (BITS == 4 ? 2 : 1);  // of 16 input features, in a tile
constexpr int UNITS_PER_BLOCK = UNITS / BLOCKS;
constexpr int INPUTS = 16 * UNITS;
constexpr int TOKENS = 8 * TILES;
constexpr int X_BYTES = X == 2 ? 4 : 2, X_PARTS = X == 2 ? 3 : 1;  // float32 is the sum of three bfloat16 numbers
constexpr int X_UNIT = 16 * X_BYTES, X_ROW = UNITS * X_UNIT;
constexpr int X_SWIZZLE = X == 2 ? 1 : 3;
constexpr int SUM_ROW = TOKENS == 8 ? 8 : TOKENS + 8;  // without bank conflicts
static_assert(WARPS >= 4 && PER <= BLOCKS);  // rows of one place in the banks are copied by a thread
constexpr int SPAN = BITS == 8 && PER < BLOCKS ? 2 : 1;     // blocks that are added up before they are scaled
constexpr int SCALE_BYTES = SCALE == 2 ? 4 : 2, MINIMUM_BYTES = MINIMUM == 2 ? 4 : 2;
static __device__ constexpr int slot_bytes(int bytes) { return PER * bytes < 4 ? 4 : PER * bytes; }
constexpr int SCALE_SLOT = slot_bytes(SCALE_BYTES), MINIMUM_SLOT = MINIMUM < 0 ? 0 : slot_bytes(MINIMUM_BYTES);

// A stage of shared memory has codes, inputs and scales of a tile. Minima and sums of inputs are needed a tile later.
constexpr int X_AT = ROWS * TILE_BYTES, SCALE_AT = X_AT + TOKENS * X_ROW, STAGE_BYTES = SCALE_AT + ROWS * SCALE_SLOT;
constexpr int MINIMUM_AT = STAGES * STAGE_BYTES, MINIMUM_BYTES_OF_TILE = ROWS * MINIMUM_SLOT;
constexpr int SUMS_AT = MINIMUM_AT + (STAGES + 1) * MINIMUM_BYTES_OF_TILE, SUMS_BYTES = MINIMUM < 0 ? 0 : PER * SUM_ROW * 4;
constexpr int SHARED_BYTES = SUMS_AT + 2 * SUMS_BYTES;
__device__ char shared_blocks[SHARED_BYTES / 16];  // its size is read by the host

constexpr u32 ONES = X == 1 ? 0x3C003C00 : 0x3F803F80;
constexpr u32 MAGIC = X == 1 ? 0x64006400 : 0x43004300;  // 1024 or 128, whose last bits are a code's
constexpr u32 BACK = (X == 1 ? 0xE400E400 : 0xC300C300) + (MINIMUM < 0 ? 0x00080008 : 0);  // minus that, or 8 more

// The inputs of one token in the two registers of a lane, in X_PARTS parts.
struct Fragment { u32 low[X_PARTS], high[X_PARTS]; };

struct Weight {
    const char *codes, *scale, *minimum;  // of the program's first output feature
    int features, row, stride, groups, group;  // bytes of a row, and between rows; numbers between rows
};

// Four codes of 4 bits are in two registers each for the low and the high halves of four bytes, in the order of inputs.
DEVICE void widen(u32 codes, u32 (&wide)[2 * UNITS_PER_BLOCK]) {
    codes = permute(codes, 0x3120);
#pragma unroll
    for (int i = 0; i < 2 * UNITS_PER_BLOCK; i++) {
#if BITS == 4
        u32 part = codes >> (i / 2 * 4 + i % 2 * 8);
        wide[i] = fma_pair(and_or(part, 0x000F000F, MAGIC), ONES, BACK);
#elif X == 1
        wide[i] = fma_pair(and_or((codes ^ 0x80808080) >> (8 * i), 0x00FF00FF, MAGIC), ONES, 0xE480E480);
#else
        u32 part = codes >> (8 * i);  // 128 + the low seven bits, minus 128 or 256
        wide[i] = fma_pair(and_or(part, 0x00800080, MAGIC), 0xBF80BF80, and_or(part, 0x007F007F, MAGIC));
#endif
    }
}

// Returns what a lane multiplies of a unit of inputs of a token: four in a row, from 4 times the lane's place in a quad.
DEVICE Fragment load_inputs(u32 x, int unit, int tile, int lane) {
    int token = 8 * tile + lane / 4;
    u32 at = x + token * X_ROW + (unit ^ (token & X_SWIZZLE)) * X_UNIT + lane % 4 * 4 * X_BYTES;
    Fragment out;
#if X == 2
    Four four = load16(at);
    float a[4] = {as_float(four.x), as_float(four.y), as_float(four.z), as_float(four.w)};
#pragma unroll
    for (int part = 0; part < 3; part++) {
        out.low[part] = to_bfloat16_pair(a[0], a[1]);
        out.high[part] = to_bfloat16_pair(a[2], a[3]);
        a[0] -= as_float(out.low[part] << 16), a[1] -= as_float(out.low[part] & 0xFFFF0000);
        a[2] -= as_float(out.high[part] << 16), a[3] -= as_float(out.high[part] & 0xFFFF0000);
    }
#else
    Two two = load8(at);
    out.low[0] = two.x, out.high[0] = two.y;
#endif
    return out;
}

DEVICE float widen_number(u32 bits, int kind) {
    return kind == 2 ? as_float(bits) : kind == 1 ? from_half(bits) : as_float(bits << 16);
}

DEVICE u32 read_number(const char* numbers, long long index, int kind) {
    return kind == 2 ? ((const u32*)numbers)[index] : ((const u16*)numbers)[index];
}

// Returns the place of a block in its row, so that eight rows have it in different banks.
DEVICE int swizzle(int row, int block) { return (block ^ (BLOCKS == 8 ? row & 7 : row >> 1 & 3)) * 16; }

template <int SIZE> DEVICE void copy(u32 to, const char* from, bool valid) {
    if constexpr (SIZE < 16) copy_few<SIZE>(to, from, valid);
    else
#pragma unroll
        for (int i = 0; i < SIZE; i += 16) copy16(to + i, from + i, valid);
}

// Copies the codes of a tile, and its scales and minima if they are whole words.
DEVICE void copy_weight(const Weight& w, u32 stage, u32 minima, int tile, int thread) {
    constexpr int STEP = THREADS / BLOCKS;  // rows at once
    const int row = thread / BLOCKS, block = thread % BLOCKS, at = tile * TILE_BYTES + block * 16;
    const u32 to = stage + row * TILE_BYTES + swizzle(row, block);
    const char* from = w.codes + (row * w.stride + at);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
        copy16(to + j * STEP * TILE_BYTES, from + j * STEP * w.stride, row + j * STEP < w.features && (WHOLE || at < w.row));
#if WHOLE
    const bool valid = thread < w.features;
    const int index = thread * w.groups + (PER > 1 ? tile * PER : tile * INPUTS / w.group);
    copy<SCALE_SLOT>(stage + SCALE_AT + thread * SCALE_SLOT, w.scale + index * SCALE_BYTES / SCALE_SLOT * SCALE_SLOT, valid);
#if MINIMUM >= 0
    copy<MINIMUM_SLOT>(minima + thread * MINIMUM_SLOT, w.minimum + index * MINIMUM_BYTES / MINIMUM_SLOT * MINIMUM_SLOT, valid);
#endif
#endif
}

// Scales and minima of one row of a tile, for each block, by way of registers.
struct Numbers {
    u32 scale[BLOCKS], minimum[BLOCKS];
};

DEVICE void read_numbers(Numbers& out, const Weight& w, int tile, int thread) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        int at = tile * TILE_BYTES + b * 16;
        bool valid = thread < w.features && at < w.row;
        int index = thread * w.groups + at * (8 / BITS) / w.group;
        out.scale[b] = valid ? read_number(w.scale, index, SCALE) : 0;
        out.minimum[b] = MINIMUM >= 0 && valid ? read_number(w.minimum, index, MINIMUM) : 0;
    }
}

DEVICE void store_number(u32 at, int index, u32 bits, int kind) {
    if (kind == 2) store4(at + 4 * index, bits);
    else store2(at + 2 * index, bits);
}

DEVICE void store_numbers(const Numbers& numbers, u32 stage, u32 minima, int thread) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        store_number(stage + SCALE_AT + thread * SCALE_SLOT, b, numbers.scale[b], SCALE);
        if (MINIMUM >= 0) store_number(minima + thread * MINIMUM_SLOT, b, numbers.minimum[b], MINIMUM);
    }
}

DEVICE void copy_inputs(const char* x, u32 stage, int tokens, int inner, int tile, int thread) {
    constexpr int CHUNKS = X_ROW / 16, PER_UNIT = X_UNIT / 16, STEP = THREADS / CHUNKS;  // tokens at once
    const int token = thread / CHUNKS, within = thread % CHUNKS, at = tile * INPUTS + within * 16 / X_BYTES;
    const u32 to = stage + X_AT + token * X_ROW + (within / PER_UNIT ^ (token & X_SWIZZLE)) * X_UNIT + within % PER_UNIT * 16;
    const char* from = x + (token * inner + at) * X_BYTES;
#pragma unroll
    for (int j = 0; j < (TOKENS + STEP - 1) / STEP; j++)
        if (TOKENS % STEP == 0 || token + j * STEP < TOKENS)
            copy16(to + j * STEP * X_ROW, from + j * STEP * inner * X_BYTES, token + j * STEP < tokens && (WHOLE || at < inner));
}

// Adds up the inputs of each group of a tile, for all warps, as a product with ones.
DEVICE void add_inputs(u32 x, u32 sums, int warp, int lane) {
#pragma unroll
    for (int item = 0; item < (TILES * PER + WARPS - 1) / WARPS; item++) {
        int index = warp + item * WARPS, n = index % TILES, group = index / TILES;
        if (group >= PER) break;
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int unit = 0; unit < UNITS / PER; unit++) {
            Fragment in = load_inputs(x, group * (UNITS / PER) + unit, n, lane);
#pragma unroll
            for (int part = 0; part < X_PARTS; part++)
                multiply(sum, ONES, ONES, ONES, ONES, in.low[part], in.high[part]);
        }
        if (lane < 4) store8(sums + (group * SUM_ROW + 8 * n + 2 * lane) * 4, sum[0], sum[1]);
    }
}

// Returns which half of a word the only scale of a tile is in.
DEVICE int half_of_word(int tile, int group) { return WHOLE && PER == 1 ? tile * INPUTS / group & 1 : 0; }

// Adds the products of minima and sums of inputs. TF32 has 11 bits, as many as float16, and a sum has two such parts.
// They are the two halves of the inner features of a product of up to four groups, which are the same in both.
DEVICE void add_minima(float (&acc)[TILES][2][4], u32 minima, u32 sums, int odd, int warp, int lane) {
    constexpr int HALVES = PER > 4 ? 2 : 1;
    const int group = lane % 4;
    float minimum[4][HALVES];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const u32 at = minima + (32 * warp + 8 * r + lane / 4) * MINIMUM_SLOT;
            const bool valid = group + 4 * h < PER;
            const int index = PER * MINIMUM_BYTES < 4 ? odd : valid ? group + 4 * h : 0;
            const u32 bits = MINIMUM == 2 ? load4(at + 4 * index) : load2(at + 2 * index);
            minimum[r][h] = valid ? widen_number(bits, MINIMUM) : 0;
        }
#pragma unroll
    for (int part = 0; part < (MINIMUM == 2 ? 3 : 1); part++) {
        u32 a[4][HALVES];
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                a[r][h] = as_bits(minimum[r][h]) & 0xFFFFE000;
                minimum[r][h] -= as_float(a[r][h]);
            }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            u32 high[HALVES], low[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const float sum = group + 4 * h < PER ? as_float(load4(sums + ((group + 4 * h) * SUM_ROW + 8 * n + lane / 4) * 4)) : 0;
                high[h] = as_bits(sum) & 0xFFFFE000;
                low[h] = as_bits(sum - as_float(high[h]));
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                u32 *first = a[2 * m], *second = a[2 * m + 1];
                if constexpr (HALVES == 1) multiply_wide(acc[n][m], first[0], second[0], first[0], second[0], high[0], low[0]);
                else {
                    multiply_wide(acc[n][m], first[0], second[0], first[1], second[1], high[0], high[1]);
                    multiply_wide(acc[n][m], first[0], second[0], first[1], second[1], low[0], low[1]);
                }
            }
        }
    }
}

// Adds the products of a tile's codes and inputs, times the scales.
DEVICE void add_products(float (&acc)[TILES][2][4], u32 stage, int odd, int warp, int lane) {
    const int row = 32 * warp + lane;
    const u32 codes = stage, x = stage + X_AT, scales = stage + SCALE_AT;
#pragma unroll (TILES > 4 ? 1 : TILES > 2 ? 4 : BLOCKS)
    for (int step = 0; step < BLOCKS / SPAN; step++) {
        u32 wide[SPAN][4][2 * UNITS_PER_BLOCK];
#pragma unroll
        for (int s = 0; s < SPAN; s++) {
            int block = step * SPAN + s;
            Four four = load_matrices(codes + row * TILE_BYTES + swizzle(row, block));
            widen(four.x, wide[s][0]), widen(four.y, wide[s][1]), widen(four.z, wide[s][2]), widen(four.w, wide[s][3]);
        }
        float scale[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 at = scales + (32 * warp + 8 * r + lane / 4) * SCALE_SLOT;
            int index = PER * SCALE_BYTES < 4 ? odd : step * SPAN * PER / BLOCKS;
            scale[r] = widen_number(SCALE == 2 ? load4(at + 4 * index) : load2(at + 2 * index), SCALE);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float sum[2][4] = {};
#pragma unroll
            for (int u = 0; u < SPAN * UNITS_PER_BLOCK; u++) {
                int s = u / UNITS_PER_BLOCK, i = u % UNITS_PER_BLOCK * 2;
                Fragment in = load_inputs(x, step * SPAN * UNITS_PER_BLOCK + u, n, lane);
#pragma unroll
                for (int part = 0; part < X_PARTS; part++)
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        multiply(sum[m], wide[s][2 * m][i], wide[s][2 * m + 1][i], wide[s][2 * m][i + 1],
                                 wide[s][2 * m + 1][i + 1], in.low[part], in.high[part]);
            }
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][m][i] = fmaf(scale[2 * m + i / 2], sum[m][i], acc[n][m][i]);
        }
    }
}

// Stores two tokens' results of an output feature. `place` identifies the registers of a thread.
DEVICE void store_results(char* out, const char* bias, float first, float second, int place, int thread, int start, int tokens, int features) {
    int lane = thread % 32;
    int f = start + 32 * (thread / 32) + 8 * (place % 4) + lane / 4, t = 8 * (place / 4) + 2 * (lane % 4);
    if (f >= features) return;
    float add = BIAS < 0 ? 0.0f : widen_number(read_number(bias, f, BIAS), BIAS);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (t + i >= tokens) return;
        float number = (i ? second : first) + add;
        long long at = (long long)(t + i) * features + f;
        if (X == 2) ((float*)out)[at] = number;
        else ((u16*)out)[at] = X == 1 ? to_half(number) : to_bfloat16(number);
    }
}

struct Arguments {
    const char *x, *codes, *scale, *minimum, *bias;
    char* out;
    float2* parts;
    int *counts, tokens, features, inner, stride, groups, group;  // stride and groups as in `Weight`
};

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) grouped_product(const Arguments arguments) {
    const auto [x, codes, scale, minimum, bias, out, parts, counts, tokens, features, inner, stride, groups, group] = arguments;
    extern __shared__ __align__(128) char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int split = blockIdx.x, splits = gridDim.x, first = blockIdx.y * ROWS;
    const long long numbers_before = (long long)first * groups;
    const Weight w = {codes + (long long)first * stride, scale + numbers_before * SCALE_BYTES, minimum + numbers_before * MINIMUM_BYTES,
                      features - first, inner * BITS / 8, stride, groups, group};
    const int all = (inner + INPUTS - 1) / INPUTS;
    const int low = (int)((long long)all * split / splits), count = (int)((long long)all * (split + 1) / splits) - low;
    float acc[TILES][2][4] = {};
    let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i < count) {
            const u32 stage = shared + i * STAGE_BYTES, minima = shared + MINIMUM_AT + i * MINIMUM_BYTES_OF_TILE;
            copy_weight(w, stage, minima, low + i, thread);
#if !WHOLE
            Numbers numbers;
            read_numbers(numbers, w, low + i, thread);
            store_numbers(numbers, stage, minima, thread);
#endif
        }
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) copy_inputs(x, shared + i * STAGE_BYTES, tokens, inner, low + i, thread);
        end_copies();
    }
    const u32 sums = shared + SUMS_AT;
    u32 stage = 0, ahead = (STAGES - 1) * STAGE_BYTES, minima = STAGES * MINIMUM_BYTES_OF_TILE, minima_ahead = (STAGES - 1) * MINIMUM_BYTES_OF_TILE;
    for (int i = 0; i < count; i++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        const int next = i + STAGES - 1;
        if (next < count) {
            copy_weight(w, shared + ahead, shared + MINIMUM_AT + minima_ahead, low + next, thread);
            copy_inputs(x, shared + ahead, tokens, inner, low + next, thread);
        }
        end_copies();
#if !WHOLE
        Numbers numbers;
        if (next < count) read_numbers(numbers, w, low + next, thread);
#endif
#if MINIMUM >= 0
        // Of the tile before, whose sums are there since the barrier.
        if (i) add_minima(acc, shared + MINIMUM_AT + minima, sums + (i + 1) % 2 * SUMS_BYTES, half_of_word(low + i - 1, group), warp, lane);
        add_inputs(shared + stage + X_AT, sums + i % 2 * SUMS_BYTES, warp, lane);
#endif
        add_products(acc, shared + stage, half_of_word(low + i, group), warp, lane);
#if !WHOLE
        if (next < count) store_numbers(numbers, shared + ahead, shared + MINIMUM_AT + minima_ahead, thread);
#endif
        stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
        ahead = ahead == (STAGES - 1) * STAGE_BYTES ? 0 : ahead + STAGE_BYTES;
        minima = minima == STAGES * MINIMUM_BYTES_OF_TILE ? 0 : minima + MINIMUM_BYTES_OF_TILE;
        minima_ahead = minima_ahead == STAGES * MINIMUM_BYTES_OF_TILE ? 0 : minima_ahead + MINIMUM_BYTES_OF_TILE;
    }
#if MINIMUM >= 0
    if (count) {
        __syncthreads();
        add_minima(acc, shared + MINIMUM_AT + minima, sums + (count + 1) % 2 * SUMS_BYTES, half_of_word(low + count - 1, group), warp, lane);
    }
#endif
    constexpr int PLACES = 4 * TILES, ITEMS = PLACES * THREADS;
    if (splits == 1) {
#pragma unroll
        for (int p = 0; p < PLACES; p++) {
            float* c = &acc[p / 4][p / 2 % 2][p % 2 * 2];
            store_results(out, bias, c[0], c[1], p, thread, first, tokens, features);
        }
        return;
    }
    float2* mine = parts + (long long)blockIdx.y * splits * ITEMS;
#pragma unroll
    for (int p = 0; p < PLACES; p++)
        if (p / 4 * 8 + lane % 4 * 2 < tokens) {
            float* c = &acc[p / 4][p / 2 % 2][p % 2 * 2];
            mine[(long long)split * ITEMS + p * THREADS + thread] = make_float2(c[0], c[1]);
        }
    __syncthreads();
    if (thread == 0) {
        __threadfence();
        atomicAdd(counts + blockIdx.y, 1);
        while (load_count(counts + blockIdx.y) < splits) {}
        __threadfence();
    }
    __syncthreads();
    // Each program adds up a share of the results, in the order of the parts.
    const int end = ITEMS * (split + 1) / splits;
    for (int item = ITEMS * split / splits + thread; item < end; item += THREADS) {
        if (item / THREADS / 4 * 8 + item % 4 * 2 >= tokens) continue;
        float2 sum = {0, 0};
        for (int s = 0; s < splits; s++) {
            float2 part = load_global(mine + (long long)s * ITEMS + item);
            sum.x += part.x, sum.y += part.y;
        }
        store_results(out, bias, sum.x, sum.y, item / THREADS, item % THREADS, first, tokens, features);
    }
    // The last program to read the count resets it for the next launch.
    if (thread == 0 && atomicAdd(counts + blockIdx.y, 1) == 2 * splits - 1) counts[blockIdx.y] = 0;
}
