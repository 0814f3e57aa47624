/* Norms, gated units, rotary embeddings and the vocabulary's softmax, each with its backward.
   Arrays are float32 and dense. Weights' gradients are sums of parts of PART rows, one after the
   other, so that they do not depend on the number of threads. */

#include "vector.h"

#define PART 64
#define BLOCK 1024 /* numbers of which the sum has float32, the sum of those has float64 */
#define SQUARES (1 << 16)
#define PARALLEL _Pragma("omp parallel for schedule(static)")

static inline long smaller(long one, long other)
{
    return one < other ? one : other;
}

static inline float inverse_root(const float *x, long width, float epsilon)
{
    return 1.0f / sqrtf(squares(x, width) / width + epsilon);
}

/* The gradient of y = w * x * inverse for one row, and what it adds to that of w. */
static inline void norm_row(const float *grad, const float *x, const float *w, float inverse,
                            float *of_x, float *of_w, long width)
{
    vec products = {0};
    for (long i = 0; i < width; i += WIDTH)
        products += take(grad, i, width) * take(w, i, width) * take(x, i, width);
    const vec scale = all(inverse), shift = scale * (sum_of(products) * inverse * inverse / width);
    for (long i = 0; i < width; i += WIDTH) {
        const vec g = take(grad, i, width), v = take(x, i, width);
        put(of_w, i, width, take(of_w, i, width) + g * v * scale);
        put(of_x, i, width, g * take(w, i, width) * scale - v * shift);
    }
}

static void add_parts(const float *parts, float *sum, long number, long width)
{
    for (long i = 0; i < width; i++)
        sum[i] = 0;
    for (long part = 0; part < number; part++)
        for (long i = 0; i < width; i++)
            sum[i] += parts[part * width + i];
}

/* y = w * x / sqrt(mean(x^2) + epsilon), of rows; `inverse` is kept for the backward. */
void rms_norm(const float *x, const float *w, float *y, float *inverse, long rows, long width,
              float epsilon)
{
    PARALLEL
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * width;
        const float scale = inverse_root(from, width, epsilon);
        inverse[row] = scale;
        for (long i = 0; i < width; i += WIDTH)
            put(y + row * width, i, width, take(w, i, width) * (take(from, i, width) * scale));
    }
}

/* `parts` has room for ceil(rows / PART) gradients of w. */
void rms_norm_backward(const float *grad, const float *x, const float *w, const float *inverse,
                       float *of_x, float *of_w, float *parts, long rows, long width)
{
    const long number = (rows + PART - 1) / PART;
    PARALLEL
    for (long part = 0; part < number; part++) {
        memset(parts + part * width, 0, sizeof(float) * width);
        for (long row = part * PART; row < smaller(rows, (part + 1) * PART); row++)
            norm_row(grad + row * width, x + row * width, w, inverse[row], of_x + row * width,
                     parts + part * width, width);
    }
    add_parts(parts, of_w, number, width);
}

/* y = x, rounded to what bfloat16 has, ties to even. NaN stays NaN. */
void round_to_bfloat16(const float *x, float *y, long count)
{
    PARALLEL
    for (long i = 0; i < count; i += WIDTH) {
        const vec v = take(x, i, count);
        const uvec bits = (uvec)v, odd = (bits >> 16) & 1;
        const uvec near = (bits + 0x7fff + odd) & 0xffff0000;
        put(y, i, count, choose(v != v, v, (vec)near));
    }
}

#define PIECE 128 /* values that are compared at once */
#define AHEAD 1024 /* values by which memory is fetched before it is compared */
#define PLACES (1 << 16) /* values of which a place has 16 bits; a multiple of PIECE */
#define WORDS (1 << 15) /* words of a block of the digest; a multiple of PIECE / 4 */

/* The upper halves of float32, rounded as in `round_to_bfloat16`. */
static inline void round_piece(const uint32_t *from, uint16_t *to, long count)
{
    for (long i = 0; i < count; i++) {
        const uint32_t bits = from[i], near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : near;
    }
}

/* Loads `size` bytes into the cache, which need not exist. */
static inline void fetch(const void *from, long start, long size)
{
    for (long i = 0; i < size; i += 64)
        __builtin_prefetch((const char *)from + start + i);
}

/* A bit for each of the first `count` values, at most 64, that differ. */
static inline uint64_t differing(const uint16_t *now, const uint16_t *before, long count)
{
    uint64_t found = 0;
#ifdef __AVX512BW__
    for (long i = 0; i < count; i += 32) {
        const __mmask32 all_of = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
        found |= (uint64_t)_mm512_cmpneq_epi16_mask(_mm512_maskz_loadu_epi16(all_of, now + i),
                                                    _mm512_maskz_loadu_epi16(all_of, before + i))
                 << i;
    }
#else
    for (long i = 0; i < count; i++)
        found |= (uint64_t)(now[i] != before[i]) << i;
#endif
    return found;
}

/* Sets `before`, `count` values of 16 bits, to `now`: such values or, if `rounds`, float32, which
   is rounded to bfloat16. `changes` has a word for each changed value, the value above its place
   in its PLACES, and `counts` the number of changes for each PLACES; `changes` is complete if there
   are at most `room`, and needs PIECE words more. `digest` is that of rloo_weights.py, with its
   `weights` and `step`. Returns the number of changes. */
long changed_values(const void *now, uint16_t *before, uint32_t *changes, int32_t *counts,
                    const uint64_t *weights, uint64_t *digest, long count, long room, long rounds,
                    unsigned long step)
{
    uint16_t rounded[PIECE] __attribute__((aligned(64)));
    uint64_t total = 2 * count, sum = 0, tail = 0;
    long found = 0;
    memset(counts, 0, sizeof *counts * ((count + PLACES - 1) / PLACES));
    for (long from = 0; from < count; from += PIECE) {
        const long size = smaller(count - from, PIECE), words = size / 4;
        const uint16_t *piece = (const uint16_t *)now + from;
        fetch(now, (from + AHEAD) * (rounds ? 4 : 2), rounds ? 4 * PIECE : 2 * PIECE);
        fetch(before, (from + AHEAD) * 2, 2 * PIECE);
        if (rounds) {
            round_piece((const uint32_t *)now + from, rounded, size);
            piece = rounded;
        }
        const uint64_t *factors = weights + from / 4 % WORDS;
        for (long i = 0; i < words; i++) {
            uint64_t word;
            memcpy(&word, piece + 4 * i, sizeof word);
            sum += word * factors[i];
        }
        if ((from + size) / 4 % WORDS == 0 && words) {
            total = total * step + sum;
            sum = 0;
        }
        memcpy(&tail, piece + 4 * words, sizeof *piece * (size % 4));
        for (long part = 0; part < size; part += 64) {
            const uint16_t *values = piece + part;
            uint16_t *old = before + from + part;
            uint32_t *to = changes + (found <= room ? found : 0);
            const uint32_t first = (from + part) % PLACES;
            uint64_t bits = differing(values, old, smaller(size - part, 64));
            counts[from / PLACES] += __builtin_popcountl(bits);
            found += __builtin_popcountl(bits);
            for (; bits; bits &= bits - 1) {
                const uint32_t place = __builtin_ctzl(bits);
                old[place] = values[place];
                *to++ = (uint32_t)values[place] << 16 | (first + place);
            }
        }
    }
    if (count / 4 % WORDS)
        total = total * step + sum;
    *digest = total * step + tail;
    return found;
}

/* Sums of squares of SQUARES numbers each. */
void sum_of_squares(const float *x, double *sums, long count)
{
    PARALLEL
    for (long part = 0; part < (count + SQUARES - 1) / SQUARES; part++) {
        double sum = 0;
        for (long from = part * SQUARES; from < smaller(count, (part + 1) * SQUARES); from += BLOCK) {
            sum += squares(x + from, smaller(BLOCK, count - from));
        }
        sums[part] = sum;
    }
}

static inline vec sigmoid(vec x)
{
    return 1.0f / (1.0f + exponential(-x));
}

/* y = gate * sigmoid(gate) * up */
void gated_unit(const float *gate, const float *up, float *y, long count)
{
    PARALLEL
    for (long i = 0; i < count; i += WIDTH) {
        const vec g = take(gate, i, count);
        put(y, i, count, g * sigmoid(g) * take(up, i, count));
    }
}

void gated_unit_backward(const float *grad, const float *gate, const float *up, float *of_gate,
                         float *of_up, long count)
{
    PARALLEL
    for (long i = 0; i < count; i += WIDTH) {
        const vec d = take(grad, i, count), g = take(gate, i, count), s = sigmoid(g);
        put(of_up, i, count, d * g * s);
        put(of_gate, i, count, d * take(up, i, count) * s * (1.0f + g * (1.0f - s)));
    }
}

/* Rotation of both halves of `size` numbers; `sign` -1 is that of the gradient. cos and sin have a
   number for each. */
static inline void rotate(const float *x, const float *cosine, const float *sine, float *y,
                          long size)
{
    const long half = size / 2;
    for (long i = 0; i < half; i += WIDTH) {
        const vec a = take(x, i, half), b = take(x + half, i, half);
        put(y, i, half, a * take(cosine, i, half) - b * take(sine, i, half));
        put(y + half, i, half, b * take(cosine + half, i, half) + a * take(sine + half, i, half));
    }
}

static inline void rotate_backward(const float *grad, const float *cosine, const float *sine,
                                   float *of_x, long size)
{
    const long half = size / 2;
    for (long i = 0; i < half; i += WIDTH) {
        const vec a = take(grad, i, half), b = take(grad + half, i, half);
        put(of_x, i, half, a * take(cosine, i, half) + b * take(sine + half, i, half));
        put(of_x + half, i, half, b * take(cosine + half, i, half) - a * take(sine, i, half));
    }
}

struct heads {
    long tokens, heads, size, period; /* tokens after which cos and sin begin again */
    float epsilon;
};

/* The heads of each token (tokens, heads, size), normalized where there is a w, and rotated. */
void rotary(const float *x, const float *w, const float *cosine, const float *sine, float *y,
            float *inverse, const struct heads *of)
{
    const long size = of->size;
    PARALLEL
    for (long token = 0; token < of->tokens; token++) {
        const long place = token % of->period * size;
        for (long head = token * of->heads; head < (token + 1) * of->heads; head++) {
            const float *from = x + head * size;
            float normal[size];
            if (w) {
                const float scale = inverse_root(from, size, of->epsilon);
                inverse[head] = scale;
                for (long i = 0; i < size; i += WIDTH)
                    put(normal, i, size, take(w, i, size) * (take(from, i, size) * scale));
                from = normal;
            }
            rotate(from, cosine + place, sine + place, y + head * size, size);
        }
    }
}

/* As `rms_norm_backward`, `parts` being of PART tokens; without a w there is no gradient of it. */
void rotary_backward(const float *grad, const float *x, const float *w, const float *cosine,
                     const float *sine, const float *inverse, float *of_x, float *of_w,
                     float *parts, const struct heads *of)
{
    const long size = of->size, number = (of->tokens + PART - 1) / PART;
    PARALLEL
    for (long part = 0; part < number; part++) {
        if (w)
            memset(parts + part * size, 0, sizeof(float) * size);
        for (long token = part * PART; token < smaller(of->tokens, (part + 1) * PART); token++) {
            const long place = token % of->period * size;
            for (long head = token * of->heads; head < (token + 1) * of->heads; head++) {
                float turned[size];
                float *to = w ? turned : of_x + head * size;
                rotate_backward(grad + head * size, cosine + place, sine + place, to, size);
                if (w)
                    norm_row(turned, x + head * size, w, inverse[head], of_x + head * size,
                             parts + part * size, size);
            }
        }
    }
    if (w)
        add_parts(parts, of_w, number, size);
}

static inline float largest_in(const float *x, long width)
{
    const long full = width - width % WIDTH;
    vec most = all(-INFINITY);
    for (long i = 0; i < full; i += WIDTH)
        most = larger(load(x + i), most);
    float found = largest_of(most);
    for (long i = full; i < width; i++)
        found = x[i] > found ? x[i] : found;
    return found;
}

/* Of each row of logits the log-prob of its target under softmax(logits / temperature), and the
   entropy where there is a place for it. Where there is one for them, exp(logits / temperature -
   the largest) and their sum are kept, perhaps in the logits' place. */
void log_softmax(const float *logits, const int64_t *targets, float *kept, float *logprobs,
                 float *entropy, float *total, long rows, long width, float temperature)
{
    const float sharpness = 1.0f / temperature;
    PARALLEL
    for (long row = 0; row < rows; row++) {
        const float *x = logits + row * width;
        const float target = x[targets[row]], most = largest_in(x, width);
        double sum = 0, weighted = 0;
        for (long start = 0; start < width; start += BLOCK) {
            const long stop = smaller(width, start + BLOCK), full = stop - (stop - start) % WIDTH;
            vec sums = {0}, products = {0};
            for (long i = start; i < full; i += WIDTH) {
                const vec z = (load(x + i) - most) * sharpness, e = exponential(z);
                sums += e;
                products += e * larger(z, all(-1e30f)); /* 0 * log 0 is 0 */
                if (kept)
                    store(kept + row * width + i, e);
            }
            sum += sum_of(sums);
            weighted += sum_of(products);
            for (long i = full; i < stop; i++) {
                const float z = (x[i] - most) * sharpness, e = exponential(all(z))[0];
                sum += e;
                weighted += e * (z > -1e30f ? z : -1e30f);
                if (kept)
                    kept[row * width + i] = e;
            }
        }
        logprobs[row] = (float)((double)(target - most) * sharpness - log(sum));
        if (entropy)
            entropy[row] = (float)(log(sum) - weighted / sum);
        if (total)
            total[row] = (float)sum;
    }
}

/* What `log_softmax` has kept becomes the gradient of the logits: `scale` (rows) is that of the
   log-probs divided by the temperature. */
void log_softmax_backward(float *kept, const float *total, const int64_t *targets,
                          const float *scale, long rows, long width)
{
    PARALLEL
    for (long row = 0; row < rows; row++) {
        float *x = kept + row * width;
        const float factor = -scale[row] / total[row];
        for (long i = 0; i < width; i += WIDTH)
            put(x, i, width, take(x, i, width) * factor);
        x[targets[row]] += scale[row];
    }
}
