/* Vectors of floats, as wide as the machine's registers, by the compiler's own extensions. */

#ifndef RLOO_VECTOR_H
#define RLOO_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
typedef uint64_t pairs __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));

static inline vec load(const float *from)
{
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float *to, vec x)
{
    memcpy(to, &x, sizeof x);
}

static inline vec all(float x)
{
    return x - (vec){0};
}

/* bfloat16 is the upper half of a float32. */
static inline vec load_half(const uint16_t *from)
{
    halves x;
    memcpy(&x, from, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}

static inline vec choose(ivec which, vec one, vec other)
{
    return (vec)(((ivec)one & which) | ((ivec)other & ~which));
}

static inline vec larger(vec one, vec other)
{
    return choose(one > other, one, other);
}

static inline float sum_of(vec x)
{
#if WIDTH == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < WIDTH; i++)
        sum += x[i];
    return sum;
#endif
}

static inline float largest_of(vec x)
{
#if WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < WIDTH; i++)
        largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

/* x = n ln 2 + r with a whole n, e^r by a polynomial (Cephes' expf): relative error below 2e-7. */
static inline vec small_power(vec x, vec n)
{
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

/* e^x, 0 below -87 and e^88 above 88. NaN stays NaN. */
static inline vec exponential(vec x)
{
    const vec low = all(-87.0f), high = all(88.0f), log2e = all(1.44269504088896341f);
#if WIDTH == 16
    x = (vec)_mm512_min_ps((__m512)high, (__m512)x);
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps((__m512)(x * log2e),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vec)_mm512_maskz_scalef_ps(seen, (__m512)small_power(x, (vec)n), n);
#else
    const vec magic = all(12582912.0f); /* 1.5 * 2^23, which rounds to an integer */
    x = choose(x > high, high, x);
    const vec n = x * log2e + magic;
    const ivec exponent = ((ivec)n - (ivec)magic + 127) << 23;
    return choose(x < low, all(0.0f), small_power(x, n - magic) * (vec)exponent);
#endif
}

/* Each number in the place of the other one of its pair. */
static inline vec neighbours(vec x)
{
    return (vec)((pairs)x << 32 | (pairs)x >> 32);
}

/* Up to a vector of the `count` numbers from `at` on; zeros behind them. */
static inline vec take(const float *from, long at, long count)
{
    if (at + WIDTH <= count)
        return load(from + at);
    vec x = {0};
    memcpy(&x, from + at, sizeof(float) * (count - at));
    return x;
}

static inline void put(float *to, long at, long count, vec x)
{
    if (at + WIDTH <= count)
        store(to + at, x);
    else
        memcpy(to + at, &x, sizeof(float) * (count - at));
}

static inline float squares(const float *x, long count)
{
    vec sums = {0};
    for (long i = 0; i < count; i += WIDTH) {
        const vec v = take(x, i, count);
        sums += v * v;
    }
    return sum_of(sums);
}

#endif
