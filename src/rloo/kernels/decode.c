/* Decoding: the next token of many rows, all layers in one call.

   One matrix product serves all of it: A (rows, depth) by *panels*, COLUMNS columns of a matrix side
   by side, (depth, COLUMNS) in memory order. Weights are packed into panels once; keys are cached as
   panels of COLUMNS tokens, values as panels of COLUMNS of their numbers, so that attention is the
   same product. Sums run over the depth in order, whatever the rows and threads are: a row's result
   depends on nothing but the row. */

#include <omp.h>

#include "vector.h"

#define COLUMNS (2 * WIDTH)
#if WIDTH == 16
#define MOST_ROWS 12 /* 24 sums, two columns and a factor in 32 registers */
#else
#define MOST_ROWS 6
#endif
#define LINE 64 /* bytes that memory is read by */
#define DRAW_BLOCK 128
#define PARTS 4 /* of a thread's work, at least, so that threads end together */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

int64_t rloo_columns(void)
{
    return COLUMNS;
}

/* -- products -- */

/* What is brought near meanwhile: `step` bytes for each row of a panel. */
typedef struct {
    const char *from;
    int64_t step;
} ahead;

#define NOTHING ((ahead){0, 0})

INLINE void multiply_rows(const int rows, const int is_half, const float *a, int64_t stride,
                          const void *panel, ahead next, int64_t depth, vec (*sums)[2])
{
    vec s[MOST_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        s[r][0] = s[r][1] = all(0);
    for (int64_t k = 0; k < depth; k++) {
        vec left, right;
        if (next.from) {
            __builtin_prefetch(next.from + k * next.step, 0, 2);
            if (next.step > LINE)
                __builtin_prefetch(next.from + k * next.step + LINE, 0, 2);
        }
        if (is_half) {
            const uint16_t *w = (const uint16_t *)panel + k * COLUMNS;
            left = load_half(w), right = load_half(w + WIDTH);
        } else {
            const float *w = (const float *)panel + k * COLUMNS;
            left = load(w), right = load(w + WIDTH);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec x = all(a[r * stride + k]);
            s[r][0] += x * left;
            s[r][1] += x * right;
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r][0] = s[r][0], sums[r][1] = s[r][1];
}

/* The products of up to MOST_ROWS rows by one panel, into `sums`. */
static void multiply(int rows, int is_half, const float *a, int64_t stride, const void *panel,
                     ahead next, int64_t depth, vec (*sums)[2])
{
#define CASE(n)                                                                                   \
    case n:                                                                                       \
        if (is_half)                                                                              \
            multiply_rows(n, 1, a, stride, panel, next, depth, sums);                             \
        else if (next.from)                                                                       \
            multiply_rows(n, 0, a, stride, panel, next, depth, sums);                             \
        else                                                                                      \
            multiply_rows(n, 0, a, stride, panel, NOTHING, depth, sums);                                \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

typedef struct {
    const void *panels; /* (columns / COLUMNS, depth, COLUMNS), float32 or bfloat16 */
    const float *bias;  /* (columns), or nothing */
    int64_t depth, columns, is_half;
} matrix;

/* What becomes of a product: `scale` (rows) multiplies it before the bias is added; it is stored,
   added, or, of the two halves of a panel, the first is the gate of the second. */
typedef enum { STORE, ADD, GATE } kind;

INLINE vec silu(vec x)
{
    return x / (exponential(-x) + 1.0f);
}

static void finish(vec (*sums)[2], int rows, const float *scale, const float *bias, kind how,
                   float *c, int64_t stride)
{
    const vec zero = all(0);
    const vec left = bias ? load(bias) : zero, right = bias ? load(bias + WIDTH) : zero;
    for (int r = 0; r < rows; r++, c += stride) {
        const vec factor = all(scale ? scale[r] : 1.0f);
        const vec one = sums[r][0] * factor + left, two = sums[r][1] * factor + right;
        if (how == GATE) {
            store(c, silu(one) * two);
        } else if (how == ADD) {
            store(c, load(c) + one);
            store(c + WIDTH, load(c + WIDTH) + two);
        } else {
            store(c, one);
            store(c + WIDTH, two);
        }
    }
}

/* This thread's part of a product of (rows, depth) by a matrix; `c` has room for whole panels. */
static void product_part(const float *a, int64_t a_stride, int64_t rows, const matrix *m,
                         const float *scale, kind how, float *c, int64_t c_stride)
{
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t panels = (m->columns + COLUMNS - 1) / COLUMNS;
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    int64_t chunks = (PARTS * threads + panels - 1) / panels;
    chunks = chunks > blocks ? blocks : chunks;
    const int64_t tasks = panels * chunks;
    const int64_t width = how == GATE ? WIDTH : COLUMNS;
    const int64_t bytes = m->depth * COLUMNS * (m->is_half ? 2 : 4);
    const int64_t step = m->is_half || blocks > chunks ? LINE : 2 * LINE;
    vec sums[MOST_ROWS][2];
    for (int64_t t = tasks * thread / threads; t < tasks * (thread + 1) / threads; t++) {
        const int64_t panel = t / chunks, chunk = t % chunks;
        const char *w = (const char *)m->panels + panel * bytes;
        const float *bias = m->bias ? m->bias + panel * COLUMNS : 0;
        const int64_t start = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
        for (int64_t b = start; b < end; b++) {
            const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
            /* A line of the next panel for each row of this one, by the first passes over it. */
            const int64_t from = (b - start) * m->depth * step;
            const ahead next = {panel + 1 < panels && from < bytes ? w + bytes + from : 0, step};
            multiply(count, m->is_half, a + first * a_stride, a_stride, w, next, m->depth, sums);
            finish(sums, count, scale ? scale + first : 0, bias, how,
                   c + first * c_stride + panel * width, c_stride);
        }
    }
}

/* C = A times the matrix, and its bias, or added to C, or gated. */
void rloo_product(const float *a, int64_t a_stride, int64_t rows, const matrix *m, int64_t how,
                  float *c, int64_t c_stride)
{
#pragma omp parallel
    product_part(a, a_stride, rows, m, 0, (kind)how, c, c_stride);
}

/* -- the model -- */

typedef struct {
    matrix qkv, out, gate_up, down;
    const float *qk_norm; /* (heads + key heads, size), or nothing */
} layer;

typedef struct {
    int64_t layers, hidden, heads, key_heads, size, inner, vocabulary;
    float hidden_floor, size_floor; /* width times epsilon */
    const layer *layer;
    const float *embedding, *norm, *rotations; /* (V, hidden), (hidden), (positions, 2, size) */
    matrix head;
} model;

/* Keys (.., slots / COLUMNS, size, COLUMNS) and values (.., size / COLUMNS, slots, COLUMNS) of
   `slots` tokens, for each layer: of prompts or rows, and key heads. */
typedef struct {
    float *const *keys, *const *values;
    int64_t slots;
} cache;

typedef struct {
    cache prompts, own;
    const int64_t *prompt_of, *prompt_lengths; /* of each row; of each prompt */
    const int64_t *positions;                  /* of each row's first own token */
    const int64_t *places;                     /* of each row in the cache */
    int64_t length;                            /* own tokens in the cache, the same for all rows */
    int64_t active;                            /* rows in computation, and their numbers */
    int64_t *rows;
} state;

/* Arrays over the rows in computation; the strides are whole panels. */
typedef struct {
    float *hidden, *states, *attended, *gated, *logits, *scales;
    int64_t hidden_stride, states_stride, attended_stride, gated_stride, logits_stride;
    float *scores; /* of each thread, `score_room` */
    int64_t score_room;
} room;

/* 1 / sqrt(sum of squares + floor) of each row, by every thread for itself. */
static const float *scale_rows(const model *m, const state *s, const room *r)
{
    float *scales = r->scales + omp_get_thread_num() * s->active;
    for (int64_t i = 0; i < s->active; i++) {
        const float *x = r->hidden + i * r->hidden_stride;
        scales[i] = 1.0f / sqrtf(squares(x, m->hidden) + m->hidden_floor);
    }
    return scales;
}

/* Norm, where the model has one, and rotation of one head, in place. */
static void turn(const model *m, float *x, const float *norm, int64_t position)
{
    if (norm) {
        const float scale = 1.0f / sqrtf(squares(x, m->size) + m->size_floor);
        for (int64_t i = 0; i < m->size; i++)
            x[i] *= scale * norm[i];
    }
    const float *by = m->rotations + position * 2 * m->size;
    for (int64_t i = 0; i < m->size; i += WIDTH) {
        const vec from = take(x, i, m->size);
        const vec across = neighbours(from) * take(by + m->size, i, m->size);
        put(x, i, m->size, from * take(by, i, m->size) + across);
    }
}

/* Have the processor bring near what is read soon: so many numbers, */
static inline void fetch(const float *from, int64_t count)
{
    for (int64_t i = 0; i < count; i += LINE / sizeof(float))
        __builtin_prefetch(from + i, 0, 2);
}

/* and the values of `length` tokens of a row or prompt, in all panels. */
static void fetch_values(const model *m, const cache *c, int64_t layer, int64_t row_head,
                         int64_t length)
{
    const int64_t wide = (m->size + COLUMNS - 1) / COLUMNS;
    for (int64_t part = row_head * wide; part < (row_head + 1) * wide; part++)
        fetch(c->values[layer] + part * c->slots * COLUMNS, length * COLUMNS);
}

static void keep_token(const model *m, const cache *own, int64_t layer, int64_t row_head,
                       int64_t slot, const float *key, const float *value)
{
    const int64_t size = m->size, wide = (size + COLUMNS - 1) / COLUMNS;
    float *keys = own->keys[layer] + row_head * own->slots * size;
    float *values = own->values[layer] + row_head * own->slots * wide * COLUMNS;
    keys += slot / COLUMNS * size * COLUMNS + slot % COLUMNS;
    for (int64_t i = 0; i < size; i++) {
        keys[i * COLUMNS] = key[i];
        values[(i / COLUMNS * own->slots + slot) * COLUMNS + i % COLUMNS] = value[i];
    }
}

/* Scores of `count` queries with `length` keys, and minus infinity up to a whole panel. */
static void score(const model *m, const float *queries, int64_t query_stride, int64_t count,
                  const float *keys, int64_t length, float *scores, int64_t stride)
{
    vec sums[MOST_ROWS][2];
    for (int64_t slot = 0; slot < length; slot += COLUMNS)
        for (int64_t q = 0; q < count; q += MOST_ROWS) {
            const int64_t rows = count - q < MOST_ROWS ? count - q : MOST_ROWS;
            multiply(rows, 0, queries + q * query_stride, query_stride, keys + slot * m->size,
                     NOTHING, m->size, sums);
            finish(sums, rows, 0, 0, STORE, scores + q * stride + slot, stride);
        }
    for (int64_t q = 0; q < count; q++)
        for (int64_t slot = length; slot % COLUMNS; slot++)
            scores[q * stride + slot] = -INFINITY;
}

/* e^(x - largest) of whole vectors in place; returns 1 / their sum. */
static float soften(float *x, int64_t n)
{
    vec most = all(-INFINITY), sums = all(0);
    for (int64_t i = 0; i < n; i += WIDTH)
        most = larger(load(x + i), most);
    const vec largest = all(largest_of(most));
    for (int64_t i = 0; i < n; i += WIDTH) {
        const vec e = exponential(load(x + i) - largest);
        store(x + i, e);
        sums += e;
    }
    return 1.0f / sum_of(sums);
}

/* Adds weights times values to `output`, (count, size) with room for whole panels. */
static void average(const model *m, const float *weights, int64_t stride, int64_t count,
                    const float *values, int64_t slots, int64_t length, float *output)
{
    const int64_t wide = (m->size + COLUMNS - 1) / COLUMNS;
    vec sums[MOST_ROWS][2];
    for (int64_t part = 0; part < wide; part++)
        for (int64_t q = 0; q < count; q += MOST_ROWS) {
            const int64_t rows = count - q < MOST_ROWS ? count - q : MOST_ROWS;
            multiply(rows, 0, weights + q * stride, stride, values + part * slots * COLUMNS,
                     NOTHING, length, sums);
            finish(sums, rows, 0, 0, ADD, output + (q * wide + part) * COLUMNS, wide * COLUMNS);
        }
}

/* Attention of some neighbouring rows that have one prompt, in one key head of a layer. */
static void attend(const model *m, const state *s, const room *r, int64_t layer, int64_t head,
                   int64_t first, int64_t count)
{
    const int64_t size = m->size, repeats = m->heads / m->key_heads;
    const int64_t wide = (size + COLUMNS - 1) / COLUMNS;
    const int64_t prompt = s->prompt_of[s->rows[first]], prompt_length = s->prompt_lengths[prompt];
    const int64_t before = (prompt_length + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t length = s->length + 1;
    const int64_t own_slots = (length + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t stride = before + own_slots;
    const int64_t queries = count * repeats, at = prompt * m->key_heads + head;
    const float *norm = m->layer[layer].qk_norm;
    float *scores = r->scores + omp_get_thread_num() * r->score_room;
    float *rows = scores + queries * stride, *output = rows + queries * size;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = s->rows[first + i], position = s->positions[row] + s->length;
        float *states = r->states + (first + i) * r->states_stride;
        float *key = states + (m->heads + head) * size, *value = key + m->key_heads * size;
        const int64_t own = s->places[row] * m->key_heads + head;
        fetch(s->own.keys[layer] + own * s->own.slots * size, own_slots * size);
        turn(m, key, norm ? norm + (m->heads + head) * size : 0, position);
        keep_token(m, &s->own, layer, own, s->length, key, value);
        for (int64_t q = 0; q < repeats; q++) {
            float *query = states + (head * repeats + q) * size;
            turn(m, query, norm ? norm + (head * repeats + q) * size : 0, position);
            memcpy(rows + (i * repeats + q) * size, query, size * sizeof *query);
        }
    }
    fetch_values(m, &s->prompts, layer, at, prompt_length);
    const float *keys = s->prompts.keys[layer] + at * s->prompts.slots * size;
    score(m, rows, size, queries, keys, prompt_length, scores, stride);
    memset(output, 0, queries * wide * COLUMNS * sizeof *output);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = s->places[s->rows[first + i]] * m->key_heads + head;
        float *own_scores = scores + i * repeats * stride + before;
        fetch_values(m, &s->own, layer, own, length);
        score(m, rows + i * repeats * size, size, repeats,
              s->own.keys[layer] + own * s->own.slots * size, length, own_scores, stride);
    }
    float totals[queries];
    for (int64_t q = 0; q < queries; q++)
        totals[q] = soften(scores + q * stride, stride);
    average(m, scores, stride, queries, s->prompts.values[layer] + at * s->prompts.slots * wide * COLUMNS,
            s->prompts.slots, prompt_length, output);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = (s->places[s->rows[first + i]] * m->key_heads + head) * s->own.slots;
        average(m, scores + i * repeats * stride + before, stride, repeats,
                s->own.values[layer] + own * wide * COLUMNS, s->own.slots, length,
                output + i * repeats * wide * COLUMNS);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t q = 0; q < repeats; q++) {
            const float *from = output + (i * repeats + q) * wide * COLUMNS;
            float *to = r->attended + (first + i) * r->attended_stride + (head * repeats + q) * size;
            for (int64_t k = 0; k < size; k++)
                to[k] = from[k] * totals[i * repeats + q];
        }
}

/* How many neighbouring rows attend together: few enough for every thread to have some, and for
   their scores to fit. */
static int64_t rows_together(const model *m, const state *s, const room *r)
{
    const int64_t size = m->size, repeats = m->heads / m->key_heads;
    const int64_t wide = (size + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t slots = s->prompts.slots + s->own.slots + size + wide;
    const int64_t fit = r->score_room / (slots * repeats);
    const int64_t fair = s->active * m->key_heads / (PARTS * omp_get_num_threads());
    const int64_t most = fit < fair ? fit : fair;
    return most < 1 ? 1 : most;
}

static void attend_part(const model *m, const state *s, const room *r, int64_t layer)
{
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t most = rows_together(m, s, r);
    int64_t number = 0;
    for (int64_t first = 0, count; first < s->active; first += count) {
        const int64_t prompt = s->prompt_of[s->rows[first]];
        for (count = 1; count < most && first + count < s->active; count++)
            if (s->prompt_of[s->rows[first + count]] != prompt)
                break;
        for (int64_t head = 0; head < m->key_heads; head++, number++)
            if (number % threads == thread)
                attend(m, s, r, layer, head, first, count);
    }
}

/* Logits of the rows in computation after one more token each. By all threads of a team. */
static void forward(const model *m, const state *s, const room *r, const int64_t *tokens)
{
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = s->active * thread / threads, end = s->active * (thread + 1) / threads;
    for (int64_t i = begin; i < end; i++)
        memcpy(r->hidden + i * r->hidden_stride, m->embedding + tokens[s->rows[i]] * m->hidden,
               m->hidden * sizeof(float));
#pragma omp barrier
    for (int64_t n = 0; n < m->layers; n++) {
        const layer *l = &m->layer[n];
        product_part(r->hidden, r->hidden_stride, s->active, &l->qkv, scale_rows(m, s, r), STORE,
                     r->states, r->states_stride);
#pragma omp barrier
        attend_part(m, s, r, n);
#pragma omp barrier
        product_part(r->attended, r->attended_stride, s->active, &l->out, 0, ADD, r->hidden,
                     r->hidden_stride);
#pragma omp barrier
        product_part(r->hidden, r->hidden_stride, s->active, &l->gate_up, scale_rows(m, s, r), GATE,
                     r->gated, r->gated_stride);
#pragma omp barrier
        product_part(r->gated, r->gated_stride, s->active, &l->down, 0, ADD, r->hidden,
                     r->hidden_stride);
#pragma omp barrier
    }
    const float *scales = scale_rows(m, s, r);
#pragma omp barrier
    for (int64_t i = begin; i < end; i++)
        for (int64_t k = 0; k < m->hidden; k++)
            r->hidden[i * r->hidden_stride + k] *= scales[i] * m->norm[k];
#pragma omp barrier
    product_part(r->hidden, r->hidden_stride, s->active, &m->head, 0, STORE, r->logits,
                 r->logits_stride);
#pragma omp barrier
}

/* -- the draw -- */

typedef struct {
    double temperature;
    int64_t greedy;
    const int64_t *stops;
    int64_t num_stops;
    const int64_t *limits; /* how many tokens each row may have */
    int64_t *next;         /* (rows): the last token of each */
    int64_t *tokens;       /* (rows, width) */
    float *logprobs;       /* (rows, width) */
    int64_t width;
    const double *noise; /* (rows, positions), of the positions from `noise_from` on */
    int64_t noise_width, noise_from;
} drawing;

/* The first token whose cumulative probability exceeds noise * total, as `invert_cdf`. */
static int64_t draw_row(float *x, int64_t vocabulary, const drawing *d, double noise, float *logprob)
{
    const int64_t whole = vocabulary / WIDTH * WIDTH;
    const vec temperature = all((float)d->temperature);
    vec most = all(-INFINITY);
    int64_t i = 0;
    for (; i < whole; i += WIDTH) {
        const vec scaled = d->temperature == 1.0 || d->greedy ? load(x + i) : load(x + i) / temperature;
        store(x + i, scaled);
        most = larger(scaled, most);
    }
    float largest = largest_of(most);
    for (; i < vocabulary; i++) {
        if (d->temperature != 1.0 && !d->greedy)
            x[i] /= (float)d->temperature;
        largest = x[i] > largest ? x[i] : largest;
    }
    double sums[(vocabulary + DRAW_BLOCK - 1) / DRAW_BLOCK], total = 0;
    const int64_t blocks = sizeof sums / sizeof *sums;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t end = (b + 1) * DRAW_BLOCK < vocabulary ? (b + 1) * DRAW_BLOCK : vocabulary;
        vec some = all(0);
        for (i = b * DRAW_BLOCK; i + WIDTH <= end; i += WIDTH)
            some += exponential(load(x + i) - largest);
        float sum = sum_of(some);
        for (; i < end; i++)
            sum += exponential(all(x[i] - largest))[0];
        total += sum;
        sums[b] = total;
    }
    int64_t token = 0;
    if (d->greedy) {
        while (token < vocabulary - 1 && x[token] != largest)
            token++;
    } else {
        const double target = noise * total;
        int64_t b = 0;
        while (b < blocks - 1 && !(sums[b] > target))
            b++;
        while (b && !(sums[b] > sums[b - 1])) /* the target was rounded up to the total */
            b--;
        double inside = 0, rest = b ? target - sums[b - 1] : target;
        const int64_t end = (b + 1) * DRAW_BLOCK < vocabulary ? (b + 1) * DRAW_BLOCK : vocabulary;
        token = b * DRAW_BLOCK;
        /* Rounded in another order, the block's sum may be below the rest: then its last token that
           has a probability is drawn. */
        for (i = token; i < end; i++) {
            const double p = exponential(all(x[i] - largest))[0];
            inside += p;
            token = p > 0 ? i : token;
            if (inside > rest)
                break;
        }
    }
    *logprob = (float)(x[token] - largest - log(total));
    return token;
}

/* Up to `steps` tokens more for each row in computation. Those that end leave it: their places are
   closed, in order. Returns how many steps were made. */
int64_t rloo_decode(const model *m, state *s, const room *r, const drawing *d, int64_t steps)
{
    int64_t done = 0;
#pragma omp parallel
    while (done < steps && s->active > 0) {
        forward(m, s, r, d->next);
        const int64_t place = s->length + 1; /* of the token drawn now */
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s->active; i++) {
            const int64_t row = s->rows[i];
            const double noise = d->noise[row * d->noise_width + place - d->noise_from];
            float *logits = r->logits + i * r->logits_stride;
            d->next[row] = draw_row(logits, m->vocabulary, d, noise, d->logprobs + row * d->width + place);
            d->tokens[row * d->width + place] = d->next[row];
        }
#pragma omp single
        {
            int64_t left = 0;
            for (int64_t i = 0; i < s->active; i++) {
                const int64_t row = s->rows[i];
                int ended = place + 1 >= d->limits[row];
                for (int64_t k = 0; k < d->num_stops; k++)
                    ended |= d->next[row] == d->stops[k];
                if (!ended)
                    s->rows[left++] = row;
            }
            s->active = left;
            s->length++;
            done++;
        }
    }
    return done;
}
