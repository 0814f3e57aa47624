/* Exact attention over packed groups, forward and backward: rows of queries (tokens, heads, size)
   see the keys (tokens, key heads, size) of their prompt and, causally, of their own span. One head
   of one group, a prompt and its completions, is a task, so that all that is summed is summed by one
   thread in one order. Keys and values are copied, padded to whole vectors, in the orders in which
   they are read; ROWS queries at a time have all their scores in cache. float32. */

#include <omp.h>
#include <stddef.h>

#include "vector.h"

#if WIDTH == 16
#define ROWS 8
#else
#define ROWS 4 /* as many accumulators as there are registers */
#endif
#define COLUMNS (2 * WIDTH)

struct attention {
    long tokens, heads, key_heads, size, groups;
    long longest; /* keys of a query */
    float scaling;
};

/* Of a group the spans `offsets[g]` to `offsets[g + 1]`; of a span its tokens and those of its prompt
   (none: equal), which all of its tokens see. */
struct span {
    int64_t start, stop, prompt, prompt_stop;
};

static inline long padded(long count)
{
    return (count + COLUMNS - 1) / COLUMNS * COLUMNS;
}

/* c (ROWS, COLUMNS) = a (ROWS, n) b (n, COLUMNS) */
static inline void multiply(const float *a, long a_row, const float *b, long b_row, long n, float *c,
                            long c_row)
{
    vec sum[ROWS][2] = {{{0}}};
    for (long k = 0; k < n; k++) {
        const vec one = load(b + k * b_row), other = load(b + k * b_row + WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            sum[i][0] += a[i * a_row + k] * one;
            sum[i][1] += a[i * a_row + k] * other;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        store(c + i * c_row, sum[i][0]);
        store(c + i * c_row + WIDTH, sum[i][1]);
    }
}

/* c (n, COLUMNS) += a (ROWS, n) transposed b (ROWS, COLUMNS) */
static inline void add_outer(const float *a, long a_row, const float *b, long b_row, long n, float *c,
                             long c_row)
{
    vec one[ROWS], other[ROWS];
    for (int i = 0; i < ROWS; i++) {
        one[i] = load(b + i * b_row);
        other[i] = load(b + i * b_row + WIDTH);
    }
    for (long j = 0; j < n; j++) {
        vec left = load(c + j * c_row), right = load(c + j * c_row + WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            left += a[i * a_row + j] * one[i];
            right += a[i * a_row + j] * other[i];
        }
        store(c + j * c_row, left);
        store(c + j * c_row + WIDTH, right);
    }
}

static inline float dot(const float *a, const float *b, long size)
{
    vec sum = {0};
    for (long d = 0; d < size; d += WIDTH)
        sum += take(a, d, size) * take(b, d, size);
    return sum_of(sum);
}

/* Where a thread keeps what it works on: `keys` and `size` are padded. */
struct room {
    long keys, size;
    float *key_columns, *values;                        /* (size, keys), (keys, size) */
    float *key_rows, *value_columns, *of_keys, *of_values; /* of the backward */
    float *query, *grad, *scores, *slopes, *output;     /* of ROWS queries */
};

static struct room lay_out(float *from, long longest, long size, int backward)
{
    struct room room = {padded(longest), padded(size)};
    float **whole[] = {&room.key_columns, &room.values, &room.key_rows, &room.value_columns,
                       &room.of_keys, &room.of_values};
    for (int i = 0; i < (backward ? 6 : 2); i++, from += room.keys * room.size)
        *whole[i] = from;
    float **rows[] = {&room.scores, &room.slopes};
    for (int i = 0; i < 2; i++, from += ROWS * room.keys)
        *rows[i] = from;
    float **states[] = {&room.query, &room.grad, &room.output};
    for (int i = 0; i < 3; i++, from += ROWS * room.size)
        *states[i] = from;
    return room;
}

/* Numbers that each thread needs room for. */
long attend_room(long longest, long size, int backward)
{
    const long keys = padded(longest), width = padded(size);
    return (backward ? 6 : 2) * keys * width + 2 * ROWS * keys + 3 * ROWS * width;
}

/* Rows (count, size) of one head from `place` on, as rows and as columns, where these are wanted. */
static void copy_in(const float *from, long stride, long count, long size, const struct room *room,
                    long place, float *rows, float *columns)
{
    for (long j = 0; rows && j < count; j++)
        memcpy(rows + (place + j) * room->size, from + j * stride, sizeof(float) * size);
    for (long d = 0; columns && d < size; d++)
        for (long j = 0; j < count; j++)
            columns[d * room->keys + place + j] = from[j * stride + d];
}

static void copy_queries(const float *from, long stride, long count, long size, long row, float *to)
{
    for (long i = 0; i < ROWS; i++)
        if (i < count)
            memcpy(to + i * row, from + i * stride, sizeof(float) * size);
        else
            memset(to + i * row, 0, sizeof(float) * size);
}

static void products(const float *rows, const float *columns, const struct room *room, long size,
                     long keys, float *to)
{
    for (long j = 0; j < keys; j += COLUMNS)
        multiply(rows, room->size, columns + j, room->keys, size, to + j, room->keys);
}

static void mix(const float *weights, const float *rows, const struct room *room, long keys, float *to)
{
    for (long d = 0; d < room->size; d += COLUMNS)
        multiply(weights, room->keys, rows + d, room->size, keys, to + d, room->size);
}

/* Scores of what row i, of `count` that come after `first` keys, does not see, up to a whole panel,
   become minus infinity; rows behind those see all. */
static void cut(float *scores, const struct room *room, long first, long count)
{
    const long keys = first + count;
    for (long i = 0; i < ROWS; i++, scores += room->keys) {
        long j = i < count ? first + i + 1 : keys;
        for (; j % WIDTH; j++)
            scores[j] = -INFINITY;
        for (; j < padded(keys); j += WIDTH)
            store(scores + j, all(-INFINITY));
    }
}

/* e^(scaling * scores - most) of ROWS rows, `most` being the largest; `total` are their sums. Rows
   take turns, since none of them waits for another. */
static void soften(float *scores, const struct room *room, long keys, float scaling, float *most,
                   float *total)
{
    vec peak[ROWS], sum[ROWS] = {{0}};
    for (int i = 0; i < ROWS; i++)
        peak[i] = all(-INFINITY);
    for (long j = 0; j < padded(keys); j += WIDTH)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            peak[i] = larger(load(scores + i * room->keys + j), peak[i]);
    for (int i = 0; i < ROWS; i++)
        most[i] = largest_of(peak[i]) * scaling;
    for (long j = 0; j < padded(keys); j += WIDTH)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            float *place = scores + i * room->keys + j;
            const vec e = exponential(load(place) * scaling - most[i]);
            sum[i] += e;
            store(place, e);
        }
    for (int i = 0; i < ROWS; i++)
        total[i] = sum_of(sum[i]);
}

static void attend_rows(const struct attention *of, const struct room *room, const float *query,
                        long first, long count, float *output, float *normalizer)
{
    const long stride = of->heads * of->size, keys = first + count;
    float most[ROWS], total[ROWS];
    copy_queries(query, stride, count, of->size, room->size, room->query);
    products(room->query, room->key_columns, room, of->size, keys, room->scores);
    cut(room->scores, room, first, count);
    soften(room->scores, room, keys, of->scaling, most, total);
    mix(room->scores, room->values, room, keys, room->output);
    for (long i = 0; i < count; i++) {
        normalizer[i * of->heads] = most[i] + logf(total[i]);
        for (long d = 0; d < of->size; d++)
            output[i * stride + d] = room->output[i * room->size + d] / total[i];
    }
}

/* Whose keys a span's queries see first, and where the rows of its own begin. */
struct places {
    long before, own, keys, queries;
};

static struct places find(const struct attention *of, const struct span *span, long head)
{
    const long key_head = head * of->key_heads / of->heads;
    return (struct places){span->prompt_stop - span->prompt, span->stop - span->start,
                           (span->start * of->key_heads + key_head) * of->size,
                           (span->start * of->heads + head) * of->size};
}

/* Keys and values of a span behind those of its prompt, which come first in a group and stay. */
static void copy_keys(const struct attention *of, const struct room *room, const float *key,
                      const float *value, const struct places *at, int backward)
{
    const long stride = of->key_heads * of->size;
    copy_in(key + at->keys, stride, at->own, of->size, room, at->before,
            backward ? room->key_rows : NULL, room->key_columns);
    copy_in(value + at->keys, stride, at->own, of->size, room, at->before,
            backward ? NULL : room->values, backward ? room->value_columns : NULL);
}

/* query and output (tokens, heads, size), key and value (tokens, key_heads, size), normalizer
   (tokens, heads): the logarithm of the softmax's. `room`: `attend_room` numbers for each thread. */
void attend(const float *query, const float *key, const float *value, float *output,
            float *normalizer, const int64_t *offsets, const struct span *spans, float *workspace,
            const struct attention *of)
{
    const long stride = of->heads * of->size, each = attend_room(of->longest, of->size, 0);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (long group = 0; group < of->groups; group++)
        for (long head = 0; head < of->heads; head++) {
            float *mine = workspace + omp_get_thread_num() * each;
            memset(mine, 0, sizeof(float) * each);
            const struct room room = lay_out(mine, of->longest, of->size, 0);
            for (long s = offsets[group]; s < offsets[group + 1]; s++) {
                const struct places at = find(of, spans + s, head);
                copy_keys(of, &room, key, value, &at, 0);
                for (long i = 0; i < at.own; i += ROWS) {
                    const long count = at.own - i < ROWS ? at.own - i : ROWS;
                    const long place = at.queries + i * stride;
                    attend_rows(of, &room, query + place, at.before + i, count, output + place,
                                normalizer + place / of->size);
                }
            }
        }
}

/* For ROWS queries the gradients of theirs, and what they add to those of keys and values. */
static void differentiate_rows(const struct attention *of, const struct room *room,
                               const float *query, const float *output, const float *normalizer,
                               const float *grad, long first, long count, float *of_query)
{
    const long stride = of->heads * of->size, keys = first + count;
    copy_queries(query, stride, count, of->size, room->size, room->query);
    copy_queries(grad, stride, count, of->size, room->size, room->grad);
    products(room->query, room->key_columns, room, of->size, keys, room->scores);
    products(room->grad, room->value_columns, room, of->size, keys, room->slopes);
    cut(room->scores, room, first, count);
    float shift[ROWS] = {0}, along[ROWS] = {0};
    for (long i = 0; i < count; i++) {
        shift[i] = normalizer[i * of->heads];
        along[i] = dot(grad + i * stride, output + i * stride, of->size);
    }
    for (long j = 0; j < padded(keys); j += WIDTH)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            float *scores = room->scores + i * room->keys + j;
            float *slopes = room->slopes + i * room->keys + j;
            const vec p = exponential(load(scores) * of->scaling - shift[i]);
            store(scores, p);
            store(slopes, p * (load(slopes) - along[i]) * of->scaling);
        }
    mix(room->slopes, room->key_rows, room, keys, room->output);
    for (long i = 0; i < count; i++)
        memcpy(of_query + i * stride, room->output + i * room->size, sizeof(float) * of->size);
    for (long d = 0; d < room->size; d += COLUMNS) {
        add_outer(room->slopes, room->keys, room->query + d, room->size, keys, room->of_keys + d,
                  room->size);
        add_outer(room->scores, room->keys, room->grad + d, room->size, keys, room->of_values + d,
                  room->size);
    }
}

static void write_back(const float *from, const struct room *room, long place, long count, long size,
                       float *to, long stride)
{
    for (long j = 0; j < count; j++)
        memcpy(to + j * stride, from + (place + j) * room->size, sizeof(float) * size);
}

static void clear(const struct room *room, long place, long count)
{
    memset(room->of_keys + place * room->size, 0, sizeof(float) * count * room->size);
    memset(room->of_values + place * room->size, 0, sizeof(float) * count * room->size);
}

/* As `attend`, with gradients of key and value for each head of queries (tokens, heads, size). */
void attend_backward(const float *grad, const float *query, const float *key, const float *value,
                     const float *output, const float *normalizer, float *of_query, float *of_key,
                     float *of_value, const int64_t *offsets, const struct span *spans,
                     float *workspace, const struct attention *of)
{
    const long size = of->size, stride = of->heads * size, each = attend_room(of->longest, size, 1);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (long group = 0; group < of->groups; group++)
        for (long head = 0; head < of->heads; head++) {
            float *mine = workspace + omp_get_thread_num() * each;
            memset(mine, 0, sizeof(float) * each);
            const struct room room = lay_out(mine, of->longest, size, 1);
            for (long s = offsets[group]; s < offsets[group + 1]; s++) {
                const struct places at = find(of, spans + s, head);
                copy_keys(of, &room, key, value, &at, 1);
                clear(&room, at.before, at.own);
                for (long i = 0; i < at.own; i += ROWS) {
                    const long count = at.own - i < ROWS ? at.own - i : ROWS;
                    const long place = at.queries + i * stride;
                    differentiate_rows(of, &room, query + place, output + place,
                                       normalizer + place / size, grad + place, at.before + i,
                                       count, of_query + place);
                }
                write_back(room.of_keys, &room, at.before, at.own, size, of_key + at.queries,
                           stride);
                write_back(room.of_values, &room, at.before, at.own, size, of_value + at.queries,
                           stride);
            }
            /* Once more, now that all that see the prompt are done. */
            const struct places first = find(of, spans + offsets[group], head);
            write_back(room.of_keys, &room, 0, first.own, size, of_key + first.queries, stride);
            write_back(room.of_values, &room, 0, first.own, size, of_value + first.queries, stride);
        }
}

/* Sums over the heads of queries that share a head of keys: (tokens, heads, size) to (tokens,
   key_heads, size). */
void sum_heads(const float *each, float *sum, const struct attention *of)
{
    const long repeats = of->heads / of->key_heads, size = of->size;
#pragma omp parallel for schedule(static)
    for (long head = 0; head < of->tokens * of->key_heads; head++)
        for (long d = 0; d < size; d += WIDTH) {
            vec total = {0};
            for (long r = 0; r < repeats; r++)
                total += take(each + (head * repeats + r) * size, d, size);
            put(sum + head * size, d, size, total);
        }
}
