// Aggregation of neighbours whose rows come a part at a time. A row is summed in the order of its neighbours, one after
// the other, whatever the parts.

enum { PART_SUM = 0, PART_SCALED = 1, PART_MAX = 2 };

template <int G, int T, int V>
__device__ __forceinline__ void accumulate(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ scales,
    const float* __restrict__ input, float* sums, u32 outputs, u32 columns, u32 mode
) {
    const int PREFETCH_DISTANCE = T == 1 ? 8 : 4;
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= outputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
    u32 start = offsets[row], end = offsets[row + 1];
    if (start == end) return;
    Pack<V> sum[T];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column < columns) sum[t] = load_own<V>(sums + (u64)row * columns + column);
    }
    for (u32 edge = start; edge < end; edge += PREFETCH_DISTANCE) {
        Pack<V> rows[PREFETCH_DISTANCE][T];
        float factor[PREFETCH_DISTANCE];
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            if (edge + a >= end) continue;
            u32 nbr = __ldg(nbrs + edge + a);
            factor[a] = mode == PART_SCALED ? __ldg(scales + nbr) : 1.0f;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 column = first + t * G * V;
                if (column < columns) rows[a][t] = load<V>(input + (u64)nbr * columns + column);
            }
        }
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            if (edge + a >= end) continue;
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (first + t * G * V >= columns) continue;
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float x = rows[a][t].x[v];
                    if (mode == PART_MAX) sum[t].x[v] = x > sum[t].x[v] ? x : sum[t].x[v];
                    else sum[t].x[v] += x * factor[a];
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column < columns) store<V>(sums + (u64)row * columns + column, sum[t]);
    }
}

#define ACCUMULATE(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) accumulate_##G##_##T##_##V( \
        const u32* offsets, const u32* nbrs, const float* scales, const float* input, float* sums, u32 outputs, \
        u32 columns, u32 mode \
    ) { \
        accumulate<G, T, V>(offsets, nbrs, scales, input, sums, outputs, columns, mode); \
    }
FOR_SHAPES(ACCUMULATE)

// Attention with a running maximum. What a head has seen so far is read from `most` and `total` and written to
// `most_to` and `total_to` by the lane that has the head's first column.
template <int G, int T, int V>
__device__ __forceinline__ void attend_more(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ hidden,
    const float* __restrict__ source_scores, const float* __restrict__ target_scores, const float* __restrict__ most,
    const float* __restrict__ total, float* most_to, float* total_to, float* sums, u32 outputs, u32 columns, u32 heads,
    float slope
) {
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= outputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V, width = columns / heads;
    u32 start = offsets[row], end = offsets[row + 1];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column >= columns) continue;
        u32 head = column / width;
        u64 place = (u64)row * heads + head;
        float target = target_scores[place], largest = most[place], weights = total[place];
        Pack<V> sum = load_own<V>(sums + (u64)row * columns + column);
        for (u32 edge = start; edge < end; edge++) {
            u32 nbr = __ldg(nbrs + edge);
            float score = __ldg(source_scores + (u64)nbr * heads + head) + target;
            score = score > 0.0f ? score : score * slope;
            Pack<V> found = load<V>(hidden + (u64)nbr * columns + column);
            if (score > largest) {
                float scale = expf(largest - score);
                weights *= scale;
#pragma unroll
                for (int v = 0; v < V; v++) sum.x[v] *= scale;
                largest = score;
            }
            float weight = expf(score - largest);
            weights += weight;
#pragma unroll
            for (int v = 0; v < V; v++) sum.x[v] += weight * found.x[v];
        }
        store<V>(sums + (u64)row * columns + column, sum);
        if (column == head * width) most_to[place] = largest, total_to[place] = weights;
    }
}

#define ATTEND_MORE(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) attend_more_##G##_##T##_##V( \
        const u32* offsets, const u32* nbrs, const float* hidden, const float* source_scores, \
        const float* target_scores, const float* most, const float* total, float* most_to, float* total_to, \
        float* sums, u32 outputs, u32 columns, u32 heads, float slope \
    ) { \
        attend_more<G, T, V>( \
            offsets, nbrs, hidden, source_scores, target_scores, most, total, most_to, total_to, sums, outputs, \
            columns, heads, slope \
        ); \
    }
FOR_SHAPES(ATTEND_MORE)

// Divides sums by their weights; averages heads if `average`.
extern "C" __global__ void end_attention(
    const float* sums, const float* total, float* to, u64 count, u32 width, u32 heads, u32 average
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    if (!average) {
        to[at] = sums[at] * (1.0f / (total[at / width] + 1e-16f));
        return;
    }
    u64 row = at / width, column = at % width;
    float sum = 0.0f, share = 1.0f / (float)heads;
    for (u32 head = 0; head < heads; head++) {
        float factor = share / (total[row * heads + head] + 1e-16f);
        sum += sums[(row * heads + head) * width + column] * factor;
    }
    to[at] = sum;
}

// Each row times its factor.
extern "C" __global__ void scale_rows(const float* factors, float* rows, u64 count, u32 columns) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) rows[at] *= factors[at / columns];
}
