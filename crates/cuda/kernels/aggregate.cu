// Aggregates neighbours' rows into one row, and gradients back. A sum is taken in the order of the neighbours, whatever the grid.

enum { MEAN = 0, SUM = 1, SUM_WITH_SELF = 2, GCN = 3 };

// How often each sampled neighbour of a node counts: exactly once if all are sampled, or without degrees.
__device__ __forceinline__ float listed_weight(const u32* degrees, u32 own, u32 listed) {
    return degrees ? (float)__ldg(degrees + own) / (float)listed : 1.0f;
}

// Sums of neighbours: G threads read one row of the input at a time, several rows ahead of the sum.
template <int G, int T, int V>
__device__ __forceinline__ void aggregate(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ scales,
    const u32* __restrict__ degrees, const float* __restrict__ input, float* __restrict__ to, u32 outputs, u32 columns,
    u32 self_first, u32 mode, float multiple
) {
    const int PREFETCH_DISTANCE = T == 1 ? 8 : 4;
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= outputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
    u32 own = self_first + row;
    bool with_self = mode == SUM_WITH_SELF || mode == GCN;
    float own_scale = mode == GCN ? scales[own] : multiple;
    Pack<V> sum[T];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
#pragma unroll
        for (int v = 0; v < V; v++) sum[t].x[v] = 0.0f;
        if (with_self && column < columns) {
            Pack<V> row_part = load<V>(input + (u64)own * columns + column);
#pragma unroll
            for (int v = 0; v < V; v++) sum[t].x[v] = row_part.x[v] * own_scale;
        }
    }
    u32 start = offsets[row], end = offsets[row + 1];
    float weight = listed_weight(degrees, own, end - start);
    for (u32 edge = start; edge < end; edge += PREFETCH_DISTANCE) {
        Pack<V> rows[PREFETCH_DISTANCE][T];
        float factor[PREFETCH_DISTANCE];
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            bool there = edge + a < end;
            u32 nbr = there ? __ldg(nbrs + edge + a) : own;
            factor[a] = !there ? 0.0f : mode != GCN ? 1.0f : nbr == own ? 0.0f : __ldg(scales + nbr) * weight;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 column = first + t * G * V;
                if (there && column < columns) rows[a][t] = load<V>(input + (u64)nbr * columns + column);
            }
        }
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            if (factor[a] == 0.0f) continue;
#pragma unroll
            for (int t = 0; t < T; t++) {
#pragma unroll
                for (int v = 0; v < V; v++) sum[t].x[v] += rows[a][t].x[v] * factor[a];
            }
        }
    }
    float last = mode == GCN ? own_scale : mode == MEAN && end - start > 1 ? 1.0f / (float)(end - start) : 1.0f;
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column >= columns) continue;
#pragma unroll
        for (int v = 0; v < V; v++) sum[t].x[v] *= last;
        store<V>(to + (u64)row * columns + column, sum[t]);
    }
}

#define AGGREGATE(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) aggregate_##G##_##T##_##V( \
        const u32* offsets, const u32* nbrs, const float* scales, const u32* degrees, const float* input, float* to, \
        u32 outputs, u32 columns, u32 self_first, u32 mode, float multiple \
    ) { \
        aggregate<G, T, V>( \
            offsets, nbrs, scales, degrees, input, to, outputs, columns, self_first, mode, multiple \
        ); \
    }
FOR_SHAPES(AGGREGATE)

// The largest of each column, and its index among the neighbours.
template <int G, int T, int V>
__device__ __forceinline__ void largest(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ input,
    float* __restrict__ to, float* __restrict__ winners, u32 outputs, u32 columns
) {
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= outputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
    u32 start = offsets[row], end = offsets[row + 1];
    Pack<V> best[T], place[T];
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int v = 0; v < V; v++) best[t].x[v] = 0.0f, place[t].x[v] = __uint_as_float(0);
    for (u32 edge = start; edge < end; edge++) {
        u32 nbr = __ldg(nbrs + edge);
#pragma unroll
        for (int t = 0; t < T; t++) {
            u32 column = first + t * G * V;
            if (column >= columns) continue;
            Pack<V> found = load<V>(input + (u64)nbr * columns + column);
#pragma unroll
            for (int v = 0; v < V; v++) {
                bool larger = edge == start || found.x[v] > best[t].x[v];
                best[t].x[v] = larger ? found.x[v] : best[t].x[v];
                place[t].x[v] = larger ? __uint_as_float(edge - start) : place[t].x[v];
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column >= columns) continue;
        store<V>(to + (u64)row * columns + column, best[t]);
        if (winners) store<V>(winners + (u64)row * columns + column, place[t]);
    }
}

#define LARGEST(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) largest_##G##_##T##_##V( \
        const u32* offsets, const u32* nbrs, const float* input, float* to, float* winners, u32 outputs, u32 columns \
    ) { \
        largest<G, T, V>(offsets, nbrs, input, to, winners, outputs, columns); \
    }
FOR_SHAPES(LARGEST)

// The gradient of each input: what the lists it stands in hand back, by the transposed lists. `has_own` says that
// the last rows already hold a part of the sum.
template <int G, int T, int V>
__device__ __forceinline__ void hand_back(
    const u32* __restrict__ starts, const u32* __restrict__ places, const u32* __restrict__ lists,
    const u32* __restrict__ offsets, const float* __restrict__ scales, const u32* __restrict__ degrees,
    const u32* __restrict__ winners, const float* __restrict__ gradient, float* __restrict__ to, u32 inputs, u32 columns,
    u32 self_first, u32 mode, float multiple, u32 has_own
) {
    const int PREFETCH_DISTANCE = T == 1 ? 4 : 2;
    u32 lane = threadIdx.x % G, input = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (input >= inputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
    bool is_output = input >= self_first;
    u32 own_output = input - self_first;
    float own_scale = mode == GCN ? scales[input] : 1.0f;
    Pack<V> sum[T];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
#pragma unroll
        for (int v = 0; v < V; v++) sum[t].x[v] = 0.0f;
        if (is_output && has_own && column < columns) sum[t] = load_own<V>(to + (u64)input * columns + column);
    }
    u32 start = starts[input], end = starts[input + 1];
    for (u32 at = start; at < end; at += PREFETCH_DISTANCE) {
        Pack<V> rows[PREFETCH_DISTANCE][T];
        float factor[PREFETCH_DISTANCE];
        u32 output[PREFETCH_DISTANCE], place[PREFETCH_DISTANCE];
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            bool there = at + a < end;
            output[a] = there ? __ldg(lists + at + a) : 0;
            factor[a] = there ? 1.0f : 0.0f;
            if (there && mode == MEAN) factor[a] = 1.0f / (float)(offsets[output[a] + 1] - offsets[output[a]]);
            if (there && mode == GCN) {
                u32 own = self_first + output[a];
                float weight = listed_weight(degrees, own, offsets[output[a] + 1] - offsets[output[a]]);
                factor[a] = own == input ? 0.0f : __ldg(scales + own) * weight * own_scale;
            }
            if (there && winners) place[a] = places[at + a] - offsets[output[a]];
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 column = first + t * G * V;
                if (there && column < columns)
                    rows[a][t] = load<V>(gradient + (u64)output[a] * columns + column);
            }
        }
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            if (factor[a] == 0.0f) continue;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 column = first + t * G * V;
                if (column >= columns) continue;
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float part = rows[a][t].x[v] * factor[a];
                    if (winners && winners[(u64)output[a] * columns + column + v] != place[a]) part = 0.0f;
                    sum[t].x[v] += part;
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column >= columns) continue;
        if (is_output && (mode == SUM_WITH_SELF || mode == GCN)) {
            Pack<V> own = load<V>(gradient + (u64)own_output * columns + column);
            float scale = mode == GCN ? own_scale * own_scale : multiple;
#pragma unroll
            for (int v = 0; v < V; v++) sum[t].x[v] += own.x[v] * scale;
        }
        store<V>(to + (u64)input * columns + column, sum[t]);
    }
}

#define HAND_BACK(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) hand_back_##G##_##T##_##V( \
        const u32* starts, const u32* places, const u32* lists, const u32* offsets, const float* scales, \
        const u32* degrees, const u32* winners, const float* gradient, float* to, u32 inputs, u32 columns, \
        u32 self_first, u32 mode, float multiple, u32 has_own \
    ) { \
        hand_back<G, T, V>( \
            starts, places, lists, offsets, scales, degrees, winners, gradient, to, inputs, columns, self_first, mode, \
            multiple, has_own \
        ); \
    }
FOR_SHAPES(HAND_BACK)

// `1 / sqrt(degree + 1)` of each input, by whole-graph degrees.
extern "C" __global__ void scales_by_degrees(const u32* degrees, float* scales, u32 inputs) {
    u32 input = blockIdx.x * blockDim.x + threadIdx.x;
    if (input < inputs) scales[input] = 1.0f / sqrtf((float)degrees[input] + 1.0f);
}

// The same by these lists: rows without a list have their self-loop only.
extern "C" __global__ void scales_by_lists(
    const u32* offsets, const u32* nbrs, float* scales, u32 inputs, u32 outputs
) {
    u32 input = blockIdx.x * blockDim.x + threadIdx.x, self_first = inputs - outputs;
    if (input >= inputs) return;
    u32 others = 0;
    if (input >= self_first) {
        u32 output = input - self_first;
        for (u32 edge = offsets[output]; edge < offsets[output + 1]; edge++) others += nbrs[edge] != input;
    }
    scales[input] = 1.0f / sqrtf((float)others + 1.0f);
}
