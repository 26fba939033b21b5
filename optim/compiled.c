/* Coding and the pair step on the CPU, in one pass over each block of 1024 values. optim/codecs and optim/noloco.py have the same in torch,
 * which is the reference; optim/compiled.py calls this through ctypes, so no header of Python is needed.
 *
 * Plain loops, for the compiler to vectorize. It must round each operation by itself (-ffp-contract=off): then all machines compute the same
 * bits. Integers wrap (-fwrapv). Pointers to floats and integers are aligned, those to bytes need not be. */
#include <stdint.h>
#include <string.h>

#define EACH_PROCESSOR
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#undef EACH_PROCESSOR
#define EACH_PROCESSOR __attribute__((target_clones("avx2", "default"))) /* the dynamic loader chooses */
#endif
#endif
#define INSIDE static inline __attribute__((always_inline)) /* so compiled for each processor with its caller */

enum { INTERFACE = 1, BLOCK = 1024, STRIDE = 16, SKETCH = 8, CHECK = 2 };

static const float SIDE = 32.0f;
static const float ROUNDING = 12582912.0f; /* as in optim/codecs/modulo.py */

/* The number that optim/compiled.py must know: raised with each change of a function's arguments. */
int32_t gossamer_interface(void) { return INTERFACE; }

INSIDE void butterflies(const float *restrict from, float *restrict to) {
    for (int i = 0; i < BLOCK / 2; ++i) {
        float a = from[i], b = from[i + BLOCK / 2];
        to[2 * i] = a + b, to[2 * i + 1] = a - b;
    }
}

/* Multiply by H, in place. A stage ends with its pairs side by side, which turns the order by one bit; ten stages restore it. */
INSIDE void transform(float *restrict x, float *restrict scratch) {
    for (int stage = 0; stage < 10; stage += 2) butterflies(x, scratch), butterflies(scratch, x);
}

INSIDE int64_t num_blocks(int64_t num_values) { return (num_values + BLOCK - 1) / BLOCK; }

/* Return block k of a message: in place, or padded with zeros in `room`. */
INSIDE const float *block(const float *message, int64_t num_values, int64_t k, float *room) {
    const float *from = message + k * BLOCK;
    int64_t left = num_values - k * BLOCK;
    if (left >= BLOCK) return from;
    memset(room, 0, BLOCK * sizeof *room);
    return memcpy(room, from, left * sizeof *room);
}

/* Write the first 8 values of each rotated block: f32[blocks, 8]. */
EACH_PROCESSOR void gossamer_sketch(const float *message, int64_t num_values, const float *signs, float *restrict out) {
    float room[BLOCK];
    for (int64_t k = 0; k < num_blocks(num_values); ++k, out += SKETCH, signs += STRIDE) {
        const float *x = block(message, num_values, k, room);
        float sums[32] = {0};
        for (int row = 0; row < BLOCK; row += 32)
            for (int i = 0; i < 32; ++i) sums[i] += x[row + i] * signs[row + i];
        for (int i = 0; i < SKETCH; ++i) { /* the other bits of the column do not change these signs */
            float total = 0.0f;
            for (int j = 0; j < 32; ++j) total += __builtin_parity(i & j) ? -sums[j] : sums[j];
            out[i] = total / SIDE;
        }
    }
}

/* Write the low `bits` of each number, in planes as optim/codecs/planes.py has them; return how many bytes that makes. */
INSIDE int pack(const uint8_t *restrict codes, int bits, uint8_t *restrict packed) {
    if (bits == 8) {
        memcpy(packed, codes, BLOCK);
        return BLOCK;
    }
    if (bits == 4) {
        for (int i = 0; i < 512; ++i) packed[i] = (codes[i] & 15) | codes[i + 512] << 4;
        return 512;
    }
    if (bits == 2) {
        for (int i = 0; i < 256; ++i)
            packed[i] = (codes[i] & 3) | (codes[i + 256] & 3) << 2 | (codes[i + 512] & 3) << 4 | (codes[i + 768] & 3) << 6;
        return 256;
    }
    uint8_t halves[512]; /* bits == 1 */
    for (int i = 0; i < 512; ++i) halves[i] = (codes[i] & 1) | (codes[i + 512] & 1) << 4;
    for (int i = 0; i < 128; ++i) packed[i] = halves[i] | halves[i + 128] << 1 | halves[i + 256] << 2 | halves[i + 384] << 3;
    return 128;
}

/* Add a plane's codes, shifted, to those in `codes`; return the next plane. */
INSIDE const uint8_t *unpack(const uint8_t *restrict packed, int bits, int shift, uint8_t *restrict codes) {
    int width = BLOCK * bits / 8, mask = (1 << bits) - 1;
    for (int group = 0; group < 8 / bits; ++group)
        for (int i = 0; i < width; ++i) codes[group * width + i] |= (packed[i] >> group * bits & mask) << shift;
    return packed + width;
}

INSIDE void pack_planes(uint8_t *restrict codes, int bits, uint8_t *restrict packed) {
    int low = bits == 6 ? 4 : bits == 3 ? 2 : bits;
    packed += pack(codes, low, packed);
    if (low == bits) return;
    for (int i = 0; i < BLOCK; ++i) codes[i] >>= low;
    pack(codes, bits - low, packed);
}

INSIDE void unpack_planes(const uint8_t *packed, int bits, uint8_t *restrict codes) {
    int low = bits == 6 ? 4 : bits == 3 ? 2 : bits;
    memset(codes, 0, BLOCK);
    packed = unpack(packed, low, 0, codes);
    if (low != bits) unpack(packed, bits - low, low, codes);
}

INSIDE void encode(const float *message, int64_t num_values, int bits, const float *signs, const float *dither, const float *steps,
                   const int16_t *weights, uint8_t *payload, int32_t *sums) {
    float room[BLOCK], x[BLOCK], scratch[BLOCK];
    int32_t numbers[BLOCK];
    uint8_t codes[BLOCK];
    int64_t count = num_blocks(num_values);
    uint8_t *checks = payload + count * (BLOCK * bits / 8);
    for (int64_t k = 0; k < count; ++k, signs += STRIDE, dither += STRIDE) {
        const float *from = block(message, num_values, k, room);
        for (int i = 0; i < BLOCK; ++i) x[i] = from[i] * signs[i];
        transform(x, scratch);
        float inverse = 1.0f / (SIDE * steps[k]);
        for (int i = 0; i < BLOCK; ++i) x[i] = (dither[i] + x[i] * inverse) + ROUNDING;
        memcpy(numbers, x, sizeof numbers);
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; ++i) sum += numbers[i] * weights[i];
        for (int i = 0; i < BLOCK; ++i) codes[i] = (uint8_t)numbers[i];
        pack_planes(codes, bits, payload + k * (BLOCK * bits / 8));
        sums[k] = sum;
        uint16_t check = (uint16_t)(sum >> bits);
        memcpy(checks + k * CHECK, &check, CHECK);
    }
}

/* Write a payload, and each block's sum: int32[blocks]. `bits`: 3, 4, 6 or 8. */
EACH_PROCESSOR void gossamer_encode(const float *message, int64_t num_values, int32_t bits, const float *signs, const float *dither,
                                    const float *steps, const int16_t *weights, uint8_t *payload, int32_t *sums) {
    if (bits == 8) encode(message, num_values, 8, signs, dither, steps, weights, payload, sums);
    if (bits == 6) encode(message, num_values, 6, signs, dither, steps, weights, payload, sums);
    if (bits == 4) encode(message, num_values, 4, signs, dither, steps, weights, payload, sums);
    if (bits == 3) encode(message, num_values, 3, signs, dither, steps, weights, payload, sums);
}

INSIDE void decode(const uint8_t *partner, const uint8_t *own, int64_t count, int bits, const float *signs, const float *steps,
                   const int16_t *weights, const int32_t *sums, float *restrict values, int32_t *restrict shifts, uint8_t *restrict tied) {
    float scratch[BLOCK];
    int16_t differences[BLOCK];
    uint8_t theirs[BLOCK], ours[BLOCK];
    int row_bytes = BLOCK * bits / 8, half = 1 << (bits - 1);
    const uint8_t *checks = partner + count * row_bytes;
    for (int64_t k = 0; k < count; ++k, signs += STRIDE, values += BLOCK) {
        unpack_planes(partner + k * row_bytes, bits, theirs);
        unpack_planes(own + k * row_bytes, bits, ours);
        uint8_t is_tied = 0;
        for (int i = 0; i < BLOCK; ++i) theirs[i] = (theirs[i] - ours[i] + half) & (2 * half - 1);
        for (int i = 0; i < BLOCK; ++i) is_tied |= theirs[i] == 0;
        for (int i = 0; i < BLOCK; ++i) differences[i] = (int16_t)(theirs[i] - half);
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; ++i) sum += differences[i] * weights[i];
        uint16_t check;
        memcpy(&check, checks + k * CHECK, CHECK);
        shifts[k] = (uint16_t)(check - ((sums[k] + sum) >> bits));
        tied[k] = is_tied;
        for (int i = 0; i < BLOCK; ++i) values[i] = (float)differences[i];
        transform(values, scratch);
        float step = steps[k] / SIDE;
        for (int i = 0; i < BLOCK; ++i) values[i] = values[i] * step * signs[i];
    }
}

/* Write the difference of two payloads, f32[blocks, 1024], and what tells the blocks that need more: shifts (int32) and ties (bool) of each. */
EACH_PROCESSOR void gossamer_decode(const uint8_t *partner, const uint8_t *own, int64_t count, int32_t bits, const float *signs,
                                    const float *steps, const int16_t *weights, const int32_t *sums, float *values, int32_t *shifts,
                                    uint8_t *tied) {
    if (bits == 8) decode(partner, own, count, 8, signs, steps, weights, sums, values, shifts, tied);
    if (bits == 6) decode(partner, own, count, 6, signs, steps, weights, sums, values, shifts, tied);
    if (bits == 4) decode(partner, own, count, 4, signs, steps, weights, sums, values, shifts, tied);
    if (bits == 3) decode(partner, own, count, 3, signs, steps, weights, sums, values, shifts, tied);
}

/* Take a part of the outer step with a partner, the rest as without one, and write the next slow weights and momentum, and what to add to the fast weights.
 * `failed` (bool, one per value) may be null; so may both momenta, together: then the momentum is zero, and stays so. */
EACH_PROCESSOR void gossamer_pair_step(const float *restrict slow, const float *restrict momentum, const float *restrict fast,
                                       const float *restrict gap, const uint8_t *restrict failed, int64_t num_values, float part,
                                       float share, float beta, float alpha, float *restrict next_slow, float *restrict next_momentum, float *restrict shift) {
    enum { SLAB = 1024 };
    for (int64_t start = 0; start < num_values; start += SLAB) {
        int count = (int)(num_values - start < SLAB ? num_values - start : SLAB);
        float pull[SLAB], alone[SLAB];
        for (int i = 0; i < count; ++i) pull[i] = (fast[start + i] - slow[start + i]) * share + gap[start + i] * 0.5f;
        if (failed || part < 1.0f)
            for (int i = 0; i < count; ++i) alone[i] = (fast[start + i] - slow[start + i]) * beta;
        if (part < 1.0f)
            for (int i = 0; i < count; ++i) pull[i] = (pull[i] - alone[i]) * part + alone[i];
        if (failed)
            for (int i = 0; i < count; ++i) pull[i] = failed[start + i] ? alone[i] : pull[i];
        if (momentum)
            for (int i = 0; i < count; ++i) next_momentum[start + i] = pull[i] = pull[i] + momentum[start + i] * alpha;
        for (int i = 0; i < count; ++i) {
            float next = slow[start + i] + pull[i];
            next_slow[start + i] = next;
            shift[start + i] = next - fast[start + i];
        }
    }
}
