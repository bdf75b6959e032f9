// Link prediction: queries, scores, losses and their gradients (crates/nn/src/link). No sum depends on the grid, and no
// float is added atomically.

enum { DOT = 0, DISTMULT = 1, TRANSE_L1 = 2, TRANSE_L2 = 3, COMPLEX = 4, ROTATE = 5 };

__device__ __forceinline__ bool is_dot(u32 decoder) { return decoder == DOT || decoder == DISTMULT || decoder == COMPLEX; }

// One query row per edge: a thread a column, or a complex number. Replacing the source negates `sign`; the angle of a
// rotation is `phase` x the relation's number.
extern "C" __global__ void __launch_bounds__(256) link_queries(
    const float* nodes, const u32* known, const float* relations, const u32* relation_of, float* queries, u32 edges,
    u32 columns, u32 decoder, float sign, float phase
) {
    u32 half = columns / 2, width = decoder == COMPLEX || decoder == ROTATE ? half : columns;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)edges * width) return;
    u32 edge = at / width, column = at % width;
    const float* row = nodes + (u64)known[edge] * columns;
    float* to = queries + (u64)edge * columns;
    if (decoder == DOT) {
        to[column] = row[column];
        return;
    }
    u32 relation = relation_of[edge];
    if (decoder == DISTMULT) {
        to[column] = row[column] * relations[(u64)relation * columns + column];
    } else if (decoder == TRANSE_L1 || decoder == TRANSE_L2) {
        to[column] = row[column] + sign * relations[(u64)relation * columns + column];
    } else {
        float re, im;
        if (decoder == COMPLEX) {
            re = relations[(u64)relation * columns + column];
            im = sign * relations[(u64)relation * columns + half + column];
        } else {
            sincosf(phase * relations[(u64)relation * half + column], &im, &re);
        }
        float x = row[column], y = row[half + column];
        to[column] = x * re - y * im;
        to[half + column] = x * im + y * re;
    }
}

// Gradients of queries become those of known ends, in place; those of relations have a row per edge.
extern "C" __global__ void __launch_bounds__(256) link_queries_back(
    const float* nodes, const u32* known, const float* relations, const u32* relation_of, float* gradient,
    float* of_relation, u32 edges, u32 columns, u32 decoder, float sign, float phase
) {
    u32 half = columns / 2, width = decoder == COMPLEX || decoder == ROTATE ? half : columns;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)edges * width) return;
    u32 edge = at / width, column = at % width;
    const float* row = nodes + (u64)known[edge] * columns;
    float* to = gradient + (u64)edge * columns;
    u32 relation = relation_of[edge];
    if (decoder == DISTMULT) {
        float slope = to[column];
        of_relation[(u64)edge * columns + column] = slope * row[column];
        to[column] = slope * relations[(u64)relation * columns + column];
    } else if (decoder == TRANSE_L1 || decoder == TRANSE_L2) {
        of_relation[(u64)edge * columns + column] = sign * to[column];
    } else {
        float a = to[column], b = to[half + column], x = row[column], y = row[half + column], re, im;
        if (decoder == COMPLEX) {
            re = relations[(u64)relation * columns + column];
            im = sign * relations[(u64)relation * columns + half + column];
            of_relation[(u64)edge * columns + column] = a * x + b * y;
            of_relation[(u64)edge * columns + half + column] = sign * (b * x - a * y);
        } else {
            sincosf(phase * relations[(u64)relation * half + column], &im, &re);
            of_relation[(u64)edge * half + column] = phase * (b * (x * re - y * im) - a * (x * im + y * re));
        }
        to[column] = a * re + b * im;
        to[half + column] = b * re - a * im;
    }
}

// The score of a pair as a sum in the order of the columns: `link_tile` has the same bits. One thread a pair.
__device__ float pair_score(const float* query, const float* node, u32 columns, u32 decoder) {
    float sum = 0.0f;
    if (decoder == ROTATE) {
        u32 half = columns / 2;
        for (u32 column = 0; column < half; column++) {
            float re = query[column] - node[column], im = query[half + column] - node[half + column];
            sum -= sqrtf(__fmaf_rn(re, re, im * im));
        }
        return sum;
    }
    for (u32 column = 0; column < columns; column++) {
        float x = query[column], y = node[column];
        if (is_dot(decoder)) sum = __fmaf_rn(x, y, sum);
        else if (decoder == TRANSE_L1) sum -= fabsf(x - y);
        else sum = __fmaf_rn(x - y, x - y, sum);
    }
    return decoder == TRANSE_L2 ? -sqrtf(sum) : sum;
}

extern "C" __global__ void __launch_bounds__(128) link_own_scores(
    const float* queries, const float* nodes, const u32* own, float* scores, u32 edges, u32 columns, u32 decoder
) {
    u32 edge = blockIdx.x * 128 + threadIdx.x;
    if (edge >= edges) return;
    scores[edge] = pair_score(queries + (u64)edge * columns, nodes + (u64)own[edge] * columns, columns, decoder);
}

static const u32 SIDE = 64, DEEP = 16;

// Scores of 64 queries and 64 candidates of their chunk: 256 threads with 4 x 4 each. Scores are written, or compared
// with a threshold per query and counted: above or not a number, and equal.
extern "C" __global__ void __launch_bounds__(256) link_tile(
    const float* queries, const float* nodes, const u32* rows, float* scores, const float* thresholds, u32* counts,
    u32 edges, u32 chunk_edges, u32 each, u32 columns, u32 decoder
) {
    __shared__ float left[2][DEEP][SIDE + 1], right[2][DEEP][SIDE + 1];
    u32 candidate_tiles = (each + SIDE - 1) / SIDE, edge_tiles = (chunk_edges + SIDE - 1) / SIDE;
    u32 candidate_tile = blockIdx.x % candidate_tiles, edge_tile = blockIdx.x / candidate_tiles;
    u32 chunk = edge_tile / edge_tiles, first_edge = chunk * chunk_edges + edge_tile % edge_tiles * SIDE;
    u32 end_edge = min(edges, (chunk + 1) * chunk_edges), first = candidate_tile * SIDE;
    u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    u32 parts = decoder == ROTATE ? 2 : 1, width = columns / parts;
    float sums[4][4] = {};
    for (u32 start = 0; start < width; start += DEEP) {
        for (u32 at = threadIdx.x; at < SIDE * DEEP * parts; at += 256) {
            u32 deep = at % DEEP, index = at / DEEP % SIDE, part = at / (DEEP * SIDE);
            u32 column = start + deep;
            u32 edge = first_edge + index, candidate = first + index;
            float x = 0.0f, y = 0.0f;
            if (column < width && edge < end_edge) x = queries[(u64)edge * columns + part * width + column];
            if (column < width && candidate < each) {
                u64 row = rows ? rows[(u64)chunk * each + candidate] : candidate;
                y = nodes[row * columns + part * width + column];
            }
            left[part][deep][index] = x;
            right[part][deep][index] = y;
        }
        __syncthreads();
        u32 deep_end = min(DEEP, width - start);
        for (u32 deep = 0; deep < deep_end; deep++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x = left[0][deep][ty * 4 + i];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float y = right[0][deep][tx + j * 16];
                    if (is_dot(decoder)) {
                        sums[i][j] = __fmaf_rn(x, y, sums[i][j]);
                    } else if (decoder == TRANSE_L1) {
                        sums[i][j] -= fabsf(x - y);
                    } else if (decoder == TRANSE_L2) {
                        sums[i][j] = __fmaf_rn(x - y, x - y, sums[i][j]);
                    } else {
                        float re = x - y, im = left[1][deep][ty * 4 + i] - right[1][deep][tx + j * 16];
                        sums[i][j] -= sqrtf(__fmaf_rn(re, re, im * im));
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 edge = first_edge + ty * 4 + i, greater = 0, equal = 0;
        if (edge >= end_edge) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 candidate = first + tx + j * 16;
            if (candidate >= each) continue;
            float score = decoder == TRANSE_L2 ? -sqrtf(sums[i][j]) : sums[i][j];
            if (scores) scores[(u64)edge * each + candidate] = score;
            if (counts) {
                equal += score == thresholds[edge];
                greater += !(score <= thresholds[edge]);
            }
        }
        if (greater) atomicAdd(counts + edge * 2, greater);
        if (equal) atomicAdd(counts + edge * 2 + 1, equal);
    }
}

// Takes filtered pairs out of the counts: a thread a pair.
extern "C" __global__ void __launch_bounds__(128) link_filter(
    const float* queries, const float* nodes, const u32* rows, const u32* pairs, const float* thresholds, u32* counts,
    u32 count, u32 chunk_edges, u32 each, u32 columns, u32 decoder
) {
    u32 at = blockIdx.x * 128 + threadIdx.x;
    if (at >= count) return;
    u32 edge = pairs[at * 2], candidate = pairs[at * 2 + 1];
    u64 row = rows ? rows[(u64)(edge / chunk_edges) * each + candidate] : candidate;
    float score = pair_score(queries + (u64)edge * columns, nodes + row * columns, columns, decoder);
    if (score == thresholds[edge]) atomicSub(counts + edge * 2 + 1, 1u);
    else if (!(score <= thresholds[edge])) atomicSub(counts + edge * 2, 1u);
}

// The part of a pair's score that one lane sums.
__device__ __forceinline__ float lane_score(const float* query, const float* node, u32 columns, u32 decoder, u32 lane) {
    float sum = 0.0f;
    if (decoder == ROTATE) {
        u32 half = columns / 2;
        for (u32 column = lane; column < half; column += 32) {
            float re = query[column] - node[column], im = query[half + column] - node[half + column];
            sum -= sqrtf(re * re + im * im);
        }
    } else {
        for (u32 column = lane; column < columns; column += 32) {
            float x = query[column], y = node[column];
            if (is_dot(decoder)) sum += x * y;
            else if (decoder == TRANSE_L1) sum -= fabsf(x - y);
            else sum += (x - y) * (x - y);
        }
    }
    return sum;
}

__device__ __forceinline__ float warp_score(const float* query, const float* node, u32 columns, u32 decoder, u32 lane) {
    float sum = group_sum<32>(lane_score(query, node, columns, decoder, lane));
    return decoder == TRANSE_L2 ? -sqrtf(sum) : sum;
}

// Scores of pairs for losses, a warp a pair: `each` candidates per edge, by rows of chunks, or one each.
extern "C" __global__ void __launch_bounds__(256) link_pairs(
    const float* queries, const float* nodes, const u32* rows, float* scores, u64 count, u32 chunk_edges, u32 each,
    u32 columns, u32 decoder
) {
    u64 at = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= count) return;
    u64 edge = at / each, candidate = at % each;
    u64 row = rows ? rows[edge / chunk_edges * each + candidate] : candidate;
    float score = warp_score(queries + edge * columns, nodes + row * columns, columns, decoder, threadIdx.x % 32);
    if (threadIdx.x % 32 == 0) scores[at] = score;
}

// Masked scores become minus infinity: listed pairs, or each edge's own candidate.
extern "C" __global__ void link_mask(float* scores, const u32* pairs, u32 count, u32 first_edge, u32 each) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) scores[(u64)(pairs[at * 2] - first_edge) * each + pairs[at * 2 + 1]] = __int_as_float(0xff800000);
}

extern "C" __global__ void link_mask_own(float* scores, const u32* own, u32 count, u32 each) {
    u32 edge = blockIdx.x * blockDim.x + threadIdx.x;
    if (edge < count) scores[(u64)edge * each + own[edge]] = __int_as_float(0xff800000);
}

enum { SOFTMAX = 0, LOGISTIC = 1, MARGIN = 2, SELF_ADVERSARIAL = 3 };

static const u32 LOSS_THREADS = 128;

__device__ double block_sum(double value) {
    __shared__ double parts[LOSS_THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL, value, distance);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0.0;
    for (u32 at = 0; at < LOSS_THREADS / 32; at++) sum += parts[at];
    return sum;
}

__device__ float block_max(float value) {
    __shared__ float parts[LOSS_THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(FULL, value, distance);
        value = other > value ? other : value;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float most = parts[0];
    for (u32 at = 1; at < LOSS_THREADS / 32; at++) most = parts[at] > most ? parts[at] : most;
    return most;
}

__device__ __forceinline__ float softplus(float x) { return (x > 0.0f ? x : x != x ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float sigmoid(float x) {
    float small = expf(-fabsf(x));
    return x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

// The gradient of a Euclidean distance's score, over the distance.
__device__ __forceinline__ float slope_of(float gradient, float score, u32 over_distance) {
    return over_distance ? (score == 0.0f ? 0.0f : gradient / -score) : gradient;
}

// Scores of an edge's negatives become their gradients: a block an edge.
extern "C" __global__ void __launch_bounds__(128) link_losses(
    float* scores, const float* own_scores, float* own_gradients, double* losses, const float* weights, u32 each,
    u32 kind, float scale, float margin, float temperature, u32 over_distance
) {
    const float LOWEST = __int_as_float(0xff800000);
    u64 edge = blockIdx.x;
    if (weights) scale *= weights[edge];
    float* own_row = scores + edge * each;
    float own = own_scores[edge], own_gradient;
    double loss;
    if (kind == SOFTMAX) {
        float most = own;
        for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS) most = own_row[at] > most ? own_row[at] : most;
        most = block_max(most);
        double sum = 0.0;
        for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS) sum += (double)expf(own_row[at] - most);
        sum = block_sum(sum);
        double total = sum + (double)expf(own - most);
        float factor = (float)((double)scale / total);
        for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS)
            own_row[at] = slope_of(expf(own_row[at] - most) * factor, own_row[at], over_distance);
        own_gradient = -(float)((double)scale * sum / total);
        loss = log(total) - (double)(own - most);
    } else {
        double count = 0.0, sum = 0.0, active = 0.0;
        float most = LOWEST;
        for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS) {
            count += own_row[at] != LOWEST;
            most = own_row[at] > most ? own_row[at] : most;
        }
        count = block_sum(count);
        float share = count == 0.0 ? 0.0f : (float)(1.0 / count);
        if (kind == SELF_ADVERSARIAL) {
            most = block_max(most);
            double total = 0.0;
            for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS)
                if (own_row[at] != LOWEST) total += (double)expf(temperature * (own_row[at] - most));
            total = block_sum(total);
            share = total == 0.0 ? 0.0f : (float)(1.0 / total);
        }
        for (u32 at = threadIdx.x; at < each; at += LOSS_THREADS) {
            float score = own_row[at], gradient = 0.0f;
            if (kind == LOGISTIC) {
                sum += (double)softplus(score);
                gradient = scale * share * sigmoid(score);
            } else if (kind == MARGIN) {
                float distance = margin - own + score;
                sum += distance <= 0.0f ? 0.0 : (double)distance;
                active += distance > 0.0f;
                gradient = distance > 0.0f ? scale * share : 0.0f;
            } else if (score != LOWEST) {
                float weight = expf(temperature * (score - most)) * share;
                sum += (double)(weight * softplus(margin + score));
                gradient = 0.5f * scale * weight * sigmoid(margin + score);
            }
            own_row[at] = slope_of(gradient, score, over_distance);
        }
        sum = block_sum(sum);
        active = block_sum(active);
        if (kind == LOGISTIC) {
            loss = (double)softplus(-own) + sum * (double)share;
            own_gradient = -scale * sigmoid(-own);
        } else if (kind == MARGIN) {
            loss = sum * (double)share;
            own_gradient = -(float)active * scale * share;
        } else {
            loss = 0.5 * ((double)softplus(-margin - own) + sum);
            own_gradient = -0.5f * scale * sigmoid(-margin - own);
        }
    }
    if (threadIdx.x == 0) {
        losses[edge] = loss * (double)scale;
        own_gradients[edge] = slope_of(own_gradient, own, over_distance);
    }
}

// `gradient` x the derivative of a pair's score by column `column` of `row`. For a Euclidean distance the gradient is
// over the distance already.
__device__ __forceinline__ float pair_slope(
    float gradient, const float* row, const float* other, u32 column, u32 columns, u32 decoder
) {
    float y = other[column];
    if (is_dot(decoder)) return gradient * y;
    float difference = row[column] - y;
    if (decoder == TRANSE_L1) return difference == 0.0f ? 0.0f : difference > 0.0f ? -gradient : gradient;
    if (decoder == TRANSE_L2) return -gradient * difference;
    u32 half = columns / 2, twin = column < half ? column + half : column - half;
    float second = row[twin] - other[twin];
    float modulus = sqrtf(difference * difference + second * second);
    return modulus == 0.0f ? 0.0f : -gradient * difference / modulus;
}

// Gradients of own scores: to the queries and to the own rows, both overwritten.
extern "C" __global__ void __launch_bounds__(256) link_back_own(
    const float* queries, const float* nodes, const u32* own, const float* gradients, float* of_queries, float* of_own,
    u32 edges, u32 columns, u32 decoder
) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)edges * columns) return;
    u32 edge = at / columns, column = at % columns;
    const float *query = queries + (u64)edge * columns, *node = nodes + (u64)own[edge] * columns;
    of_queries[at] = pair_slope(gradients[edge], query, node, column, columns, decoder);
    of_own[at] = pair_slope(gradients[edge], node, query, column, columns, decoder);
}

// The factor of both parts of the difference of two complex numbers in the gradient of its modulus.
__device__ __forceinline__ float modulus_slope(float gradient, float re, float im) {
    float modulus = sqrtf(re * re + im * im);
    return modulus == 0.0f ? 0.0f : gradient / modulus;
}

// A sum of gradients by a row: of one column, or of both parts of a complex number whose modulus is a score's term.
struct RowSum {
    const float* row;
    float* to;
    float first, second;
    u32 column, columns, decoder;

    __device__ __forceinline__ RowSum(const float* row, float* to, u32 column, u32 columns, u32 decoder, bool adds)
        : row(row), to(to), first(0.0f), second(0.0f), column(column), columns(columns), decoder(decoder) {
        if (!adds) return;
        first = to[column];
        if (decoder == ROTATE) second = to[columns / 2 + column];
    }

    __device__ __forceinline__ void add(float gradient, const float* other) {
        if (decoder != ROTATE) {
            first += pair_slope(gradient, row, other, column, columns, decoder);
            return;
        }
        u32 half = columns / 2;
        float re = row[column] - other[column], im = row[half + column] - other[half + column];
        float slope = modulus_slope(gradient, re, im);
        first -= slope * re;
        second -= slope * im;
    }

    __device__ __forceinline__ void store() {
        to[column] = first;
        if (decoder == ROTATE) to[columns / 2 + column] = second;
    }
};

// Threads of a row: one a column, or a complex number.
__device__ __forceinline__ u32 row_threads(u32 columns, u32 decoder) { return decoder == ROTATE ? columns / 2 : columns; }

// Adds the gradients of all candidates' scores to the queries.
extern "C" __global__ void __launch_bounds__(256) link_back_queries(
    const float* queries, const float* nodes, const u32* rows, const float* gradients, float* of_queries, u32 edges,
    u32 first_edge, u32 chunk_edges, u32 each, u32 columns, u32 decoder
) {
    u32 threads = row_threads(columns, decoder);
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)edges * threads) return;
    u64 edge = at / threads;
    u32 chunk = (first_edge + edge) / chunk_edges;
    RowSum sum(queries + edge * columns, of_queries + edge * columns, at % threads, columns, decoder, true);
    for (u32 candidate = 0; candidate < each; candidate++) {
        u64 row = rows ? rows[(u64)chunk * each + candidate] : candidate;
        sum.add(gradients[edge * each + candidate], nodes + row * columns);
    }
    sum.store();
}

// Adds the gradients of a chunk's edges to its `count` candidates. `edges` are those whose gradients are here, from
// `first_edge` on.
extern "C" __global__ void __launch_bounds__(256) link_back_candidates(
    const float* queries, const float* nodes, const u32* rows, const float* gradients, float* of_candidates, u64 count,
    u32 edges, u32 first_edge, u32 chunk_edges, u32 each, u32 columns, u32 decoder
) {
    u32 threads = row_threads(columns, decoder);
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count * threads) return;
    u64 position = at / threads;
    u32 chunk = position / each, candidate = position % each;
    u64 row = rows ? rows[position] : position;
    u32 start = max(chunk * chunk_edges, first_edge), end = min((chunk + 1) * chunk_edges, first_edge + edges);
    RowSum sum(nodes + row * columns, of_candidates + position * columns, at % threads, columns, decoder, true);
    for (u32 edge = start; edge < end; edge++) {
        u64 local = edge - first_edge;
        sum.add(gradients[local * each + candidate], queries + local * columns);
    }
    sum.store();
}

// The same for chunks of one edge, summed by node: positions of a node's candidates are its members.
extern "C" __global__ void __launch_bounds__(256) link_back_nodes(
    const float* queries, const float* nodes, const u32* offsets, const u32* members, const float* gradients,
    float* of_nodes, u32 count, u32 each, u32 columns, u32 decoder
) {
    u32 threads = row_threads(columns, decoder);
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)count * threads) return;
    u64 node = at / threads;
    RowSum sum(nodes + node * columns, of_nodes + node * columns, at % threads, columns, decoder, false);
    for (u32 member = offsets[node]; member < offsets[node + 1]; member++) {
        u64 position = members[member];
        sum.add(gradients[position], queries + position / each * columns);
    }
    sum.store();
}

// Euclidean distances after matmuls with the weights: `to -= sum of a row of weights x row`. A warp a row.
extern "C" __global__ void __launch_bounds__(256) link_less_rows(
    const float* weights, const float* rows, float* to, u32 count, u32 each, u32 columns
) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= count) return;
    float sum = 0.0f;
    for (u32 at = lane; at < each; at += 32) sum += weights[(u64)row * each + at];
    sum = group_sum<32>(sum);
    for (u32 column = lane; column < columns; column += 32)
        to[(u64)row * columns + column] -= sum * rows[(u64)row * columns + column];
}

// The same by columns of weights, over the edges of each chunk: a warp a candidate.
extern "C" __global__ void __launch_bounds__(256) link_less_candidates(
    const float* weights, const float* rows, float* to, u64 count, u32 edges, u32 first_edge, u32 chunk_edges, u32 each,
    u32 columns
) {
    u64 position = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    u32 lane = threadIdx.x % 32;
    if (position >= count) return;
    u32 chunk = position / each, candidate = position % each;
    u32 start = max(chunk * chunk_edges, first_edge), end = min((chunk + 1) * chunk_edges, first_edge + edges);
    float sum = 0.0f;
    for (u32 edge = start + lane; edge < end; edge += 32) sum += weights[(u64)(edge - first_edge) * each + candidate];
    sum = group_sum<32>(sum);
    for (u32 column = lane; column < columns; column += 32)
        to[position * columns + column] -= sum * rows[position * columns + column];
}
