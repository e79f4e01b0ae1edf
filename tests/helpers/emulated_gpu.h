// Runs a kernel in CUDA C++ on a CPU: threads are coroutines, which wait for each other where those of a GPU do.
//
// Instructions of warps follow the layouts of registers in PTX's manual. A copy from global memory to shared memory
// takes place when it is waited for, as late as it may, and shared memory has NaN in it at first.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define DEVICE static inline
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct Two { u32 x, y; };
struct Four { u32 x, y, z, w; };
struct float2 { float x, y; };
struct Place { int x, y; };
struct Copy { u32 to; const void* from; int size; bool valid; };
struct Warp { u32 given[2][32][6]; u64 round; int arrived; };
struct Program { std::vector<char> memory; std::vector<Warp> warps; u64 round = 0; int arrived = 0; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    Place thread, block;
    Program* program;
    u64 round = 0;
    std::vector<std::vector<Copy>> copies{1};
    bool done = false;
};

static Thread* current;
static ucontext_t scheduler;
static Place gridDim;
static int threads;
char memory[1];
#define threadIdx (current->thread)
#define blockIdx (current->block)

static void fail(const char* what) { fprintf(stderr, "%s\n", what), abort(); }
static void give_way() { swapcontext(&current->context, &scheduler); }
static void arrive(u64& round, int& arrived, int all) {
    u64 mine = round;
    if (++arrived == all) arrived = 0, round++;
    else while (round == mine) give_way();
}
static void __syncthreads() { arrive(current->program->round, current->program->arrived, threads); }
static void __threadfence() {}
static int atomicAdd(int* at, int number) { int before = *at; return *at += number, before; }
static float2 make_float2(float x, float y) { return {x, y}; }

static char* shared(u32 at, int size) {
    if (at % size || at + size > current->program->memory.size()) fail("a wrong address in shared memory");
    return current->program->memory.data() + at;
}
static u32 shared_address(const void*) { return 0; }
static float as_float(u32 bits) { float number; memcpy(&number, &bits, 4); return number; }
static u32 as_bits(float number) { u32 bits; memcpy(&bits, &number, 4); return bits; }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}
static void end_copies() { current->copies.emplace_back(); }
template <int SIZE> static void copy_few(u32 to, const void* from, bool valid) { current->copies.back().push_back({to, from, SIZE, valid}); }
static void copy16(u32 to, const void* from, bool valid) { copy_few<16>(to, from, valid); }
template <int LEFT> static void wait_for_copies() {
    while ((int)current->copies.size() - 1 > LEFT) {
        for (Copy& copy : current->copies[0]) {
            if (copy.valid && (uintptr_t)copy.from % copy.size) fail("a wrong address in global memory");
            if (copy.valid) memcpy(shared(copy.to, copy.size), copy.from, copy.size);
            else memset(shared(copy.to, copy.size), 0, copy.size);
        }
        current->copies.erase(current->copies.begin());
    }
}

static u32 load2(u32 at) { u16 out; memcpy(&out, shared(at, 2), 2); return out; }
static u32 load4(u32 at) { u32 out; memcpy(&out, shared(at, 4), 4); return out; }
static Two load8(u32 at) { Two out; memcpy(&out, shared(at, 8), 8); return out; }
static Four load16(u32 at) { Four out; memcpy(&out, shared(at, 16), 16); return out; }
static void store2(u32 at, u32 bits) { memcpy(shared(at, 2), &bits, 2); }
static void store4(u32 at, u32 bits) { memcpy(shared(at, 4), &bits, 4); }
static void store8(u32 at, float x, float y) { memcpy(shared(at, 8), &x, 4), memcpy(shared(at, 8) + 4, &y, 4); }
static float2 load_global(const float2* at) { return *at; }
static int load_count(const int* at) { give_way(); return *at; }

static float from_half(u32 bits) { u16 low = bits; _Float16 half; memcpy(&half, &low, 2); return half; }
static u32 to_half(float number) { _Float16 half = number; u16 bits; memcpy(&bits, &half, 2); return bits; }
static u32 to_bfloat16(float number) { u32 bits = as_bits(number); return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }
static u32 to_bfloat16_pair(float low, float high) { return to_bfloat16(low) | to_bfloat16(high) << 16; }
static float wide(u32 bits) { return X == 1 ? from_half(bits) : as_float(bits << 16); }
static u32 narrow(float number) { return X == 1 ? to_half(number) : to_bfloat16(number); }
static u32 fma_pair(u32 a, u32 b, u32 c) {
    return narrow(fmaf(wide(a & 0xFFFF), wide(b & 0xFFFF), wide(c & 0xFFFF))) | narrow(fmaf(wide(a >> 16), wide(b >> 16), wide(c >> 16))) << 16;
}
static u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
static u32 permute(u32 a, u32 selector) {
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (a >> 8 * (selector >> 4 * i & 3) & 255) << 8 * i;
    return out;
}

// Returns what the lanes of a warp have given. Two buffers, since none gives again before all have read the last but one.
static u32 (*exchange(std::vector<u32> mine))[6] {
    Warp& warp = current->program->warps[current->thread.x / 32];
    int buffer = current->round++ % 2;
    memcpy(warp.given[buffer][current->thread.x % 32], mine.data(), 4 * mine.size());
    arrive(warp.round, warp.arrived, 32);
    return warp.given[buffer];
}
static Four load_matrices(u32 at) {
    auto rows = exchange({at});
    int lane = current->thread.x % 32;
    u32 out[4];
    for (int i = 0; i < 4; i++) memcpy(&out[i], shared(rows[8 * i + lane / 4][0], 16) + lane % 4 * 4, 4);
    return {out[0], out[1], out[2], out[3]};
}
// Adds a product of 16 rows and 8 columns; `number` returns one of two numbers of a register.
template <class Number> static void add(float (&sums)[4], u32 (*given)[6], int in_register, Number number) {
    int lane = current->thread.x % 32;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2, half = 4 * in_register;
        double sum = sums[i];
        for (int k = 0; k < 2 * half; k++) {
            int quad = k % half / in_register, part = k % in_register;
            sum += (double)number(given[row % 8 * 4 + quad][row / 8 + k / half * 2], part) * number(given[column * 4 + quad][4 + k / half], part);
        }
        sums[i] = sum;
    }
}
static void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    add(sums, exchange({a0, a1, a2, a3, b0, b1}), 2, [](u32 bits, int part) { return wide(part ? bits >> 16 : bits & 0xFFFF); });
}
static void multiply_wide(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    add(sums, exchange({a0, a1, a2, a3, b0, b1}), 1, [](u32 bits, int) { return as_float(bits & 0xFFFFE000); });
}

// Runs all programs of a grid at once, since they may wait for each other.
template <class Entry> static void run_grid(int columns, int rows, int warps, int bytes, Entry entry) {
    gridDim = {columns, rows}, threads = 32 * warps;
    std::vector<Program> programs(columns * rows);
    std::vector<Thread> all(programs.size() * threads);
    for (Program& program : programs) {
        program.memory.assign(bytes, (char)0xFF), program.warps.resize(warps);
        for (Warp& warp : program.warps) warp.round = 0, warp.arrived = 0;
    }
    for (size_t i = 0; i < all.size(); i++) {
        Thread& thread = all[i];
        int block = i / threads;
        thread.program = &programs[block], thread.thread = {(int)i % threads, 0}, thread.block = {block % columns, block / columns};
        thread.stack.resize(1 << 15);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, entry, 0);
    }
    for (size_t left = all.size(); left;)
        for (Thread& thread : all)
            if (!thread.done) current = &thread, swapcontext(&scheduler, &thread.context), left -= thread.done;
}
