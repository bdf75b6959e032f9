// GAT's attention over neighbours and each node itself; neighbours equal to the node count once, as its self-loop. Weights
// have a row an edge, then a row an output for its self-loop; heads lie side by side.

__device__ __forceinline__ float leaky(float score, float slope) { return score > 0.0f ? score : score * slope; }

// Scores of rows: a warp a row, each head's part times the vector's. Rows from `targets_from` on are also scored as
// targets.
extern "C" __global__ void __launch_bounds__(256) score_rows(
    const float* hidden, const float* source, const float* target, float* source_scores, float* target_scores,
    u32 rows, u32 columns, u32 heads, u32 targets_from
) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, width = columns / heads;
    if (row >= rows) return;
    const float* values = hidden + (u64)row * columns;
    bool scored = row >= targets_from;
    for (u32 head = 0; head < heads; head++) {
        float as_source = 0.0f, as_target = 0.0f;
        for (u32 column = head * width + lane; column < (head + 1) * width; column += 32) {
            float x = values[column];
            as_source += x * source[column];
            if (scored) as_target += x * target[column];
        }
        as_source = group_sum<32>(as_source);
        if (lane == 0) source_scores[(u64)row * heads + head] = as_source;
        if (!scored) continue;
        as_target = group_sum<32>(as_target);
        if (lane == 0) target_scores[(u64)(row - targets_from) * heads + head] = as_target;
    }
}

// The same where a head's part is 4 x G numbers: G lanes a head, all heads of a row at once.
template <int G>
__device__ __forceinline__ void score_parts(
    const float* __restrict__ hidden, const float* __restrict__ source, const float* __restrict__ target,
    float* __restrict__ source_scores, float* __restrict__ target_scores, u32 rows, u32 heads, u32 targets_from
) {
    u64 part = (u64)blockIdx.x * (256 / G) + threadIdx.x / G;
    u32 lane = threadIdx.x % G, head = part % heads;
    u64 row = part / heads;
    bool there = row < rows, scored = there && row >= targets_from;
    float as_source = 0.0f, as_target = 0.0f;
    if (there) {
        Pack<4> x = load<4>(hidden + part * (4 * G) + lane * 4);
        Pack<4> s = load<4>(source + head * (4 * G) + lane * 4);
        Pack<4> t = load<4>(target + head * (4 * G) + lane * 4);
#pragma unroll
        for (int v = 0; v < 4; v++) as_source += x.x[v] * s.x[v], as_target += x.x[v] * t.x[v];
    }
    as_source = group_sum<G>(as_source);
    as_target = group_sum<G>(as_target);
    if (there && lane == 0) source_scores[part] = as_source;
    if (scored && lane == 0) target_scores[part - (u64)targets_from * heads] = as_target;
}

#define SCORE_PARTS(G) \
    extern "C" __global__ void __launch_bounds__(256) score_parts_##G( \
        const float* hidden, const float* source, const float* target, float* source_scores, float* target_scores, \
        u32 rows, u32 heads, u32 targets_from \
    ) { \
        score_parts<G>(hidden, source, target, source_scores, target_scores, rows, heads, targets_from); \
    }
SCORE_PARTS(1) SCORE_PARTS(2) SCORE_PARTS(4) SCORE_PARTS(8) SCORE_PARTS(16) SCORE_PARTS(32)

// Softmax weights of each node's neighbours: a thread per output and head, in the order of the neighbours. `dropped` takes them after
// dropout, where it is given.
extern "C" __global__ void weigh_lists(
    const u32* offsets, const u32* nbrs, const float* source_scores, const float* target_scores, float* weights,
    float* dropped, u32 inputs, u32 outputs, u32 edges, u32 heads, float slope, Dropout dropout
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)outputs * heads) return;
    u32 output = at / heads, head = at % heads, own = inputs - outputs + output;
    u32 start = offsets[output], end = offsets[output + 1];
    float target = target_scores[at];
    float self = leaky(source_scores[(u64)own * heads + head] + target, slope), most = self;
    for (u32 edge = start; edge < end; edge++) {
        u32 nbr = nbrs[edge];
        float score = leaky(source_scores[(u64)nbr * heads + head] + target, slope);
        weights[(u64)edge * heads + head] = score;
        most = nbr != own && score > most ? score : most;
    }
    float sum = 0.0f;
    for (u32 edge = start; edge < end; edge++) {
        u64 place = (u64)edge * heads + head;
        float weight = nbrs[edge] == own ? 0.0f : expf(weights[place] - most);
        weights[place] = weight;
        sum += weight;
    }
    self = expf(self - most);
    sum += self;
    float reciprocal = 1.0f / (sum + 1e-16f);
    for (u32 edge = start; edge <= end; edge++) {
        u64 row = edge < end ? edge : (u64)edges + output;
        u64 place = row * heads + head;
        float weight = (edge < end ? weights[place] : self) * reciprocal;
        weights[place] = weight;
        if (dropped) dropped[place] = weight * drop_factor(dropout, row, head, heads);
    }
}

// Weighted sums of neighbours: as `aggregate`, with a weight per edge and head.
template <int G, int T, int V>
__device__ __forceinline__ void attend(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ weights,
    const float* __restrict__ hidden, float* __restrict__ to, u32 inputs, u32 outputs, u32 edges, u32 columns, u32 heads
) {
    const int PREFETCH_DISTANCE = T == 1 ? 4 : 2;
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= outputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V, width = columns / heads, own = inputs - outputs + row;
    u32 start = offsets[row], end = offsets[row + 1];
    Pack<V> sum[T];
    u32 head[T];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        head[t] = min(column / width, heads - 1);
        Pack<V> own_row;
        float weight = weights[((u64)edges + row) * heads + head[t]];
        if (column < columns) own_row = load<V>(hidden + (u64)own * columns + column);
#pragma unroll
        for (int v = 0; v < V; v++) sum[t].x[v] = column < columns ? own_row.x[v] * weight : 0.0f;
    }
    for (u32 edge = start; edge < end; edge += PREFETCH_DISTANCE) {
        Pack<V> rows[PREFETCH_DISTANCE][T];
        float weight[PREFETCH_DISTANCE][T];
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            bool there = edge + a < end;
            u32 nbr = there ? __ldg(nbrs + edge + a) : own;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 column = first + t * G * V;
                bool counts = there && nbr != own && column < columns;
                weight[a][t] = counts ? __ldg(weights + ((u64)edge + a) * heads + head[t]) : 0.0f;
                if (counts) rows[a][t] = load<V>(hidden + (u64)nbr * columns + column);
            }
        }
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (weight[a][t] == 0.0f) continue;
#pragma unroll
                for (int v = 0; v < V; v++) sum[t].x[v] += rows[a][t].x[v] * weight[a][t];
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column < columns) store<V>(to + (u64)row * columns + column, sum[t]);
    }
}

#define ATTEND(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) attend_##G##_##T##_##V( \
        const u32* offsets, const u32* nbrs, const float* weights, const float* hidden, float* to, u32 inputs, \
        u32 outputs, u32 edges, u32 columns, u32 heads \
    ) { \
        attend<G, T, V>(offsets, nbrs, weights, hidden, to, inputs, outputs, edges, columns, heads); \
    }
FOR_SHAPES(ATTEND)

// Gradients of the weights: a warp per neighbour's row, heads one after the other. For widths without a better way.
extern "C" __global__ void __launch_bounds__(256) weight_slopes(
    const u32* offsets, const u32* nbrs, const float* hidden, const float* gradient, float* slopes, u32 inputs,
    u32 outputs, u32 edges, u32 columns, u32 heads
) {
    u32 output = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, width = columns / heads;
    if (output >= outputs) return;
    u32 start = offsets[output], end = offsets[output + 1], own = inputs - outputs + output;
    const float* slope_row = gradient + (u64)output * columns;
    for (u32 edge = start; edge <= end; edge++) {
        u32 nbr = edge < end ? nbrs[edge] : own;
        u64 row = edge < end ? edge : (u64)edges + output;
        for (u32 head = 0; head < heads; head++) {
            float sum = 0.0f;
            for (u32 column = head * width + lane; column < (head + 1) * width; column += 32)
                sum += hidden[(u64)nbr * columns + column] * slope_row[column];
            sum = group_sum<32>(sum);
            if (lane == 0) slopes[row * heads + head] = sum;
        }
    }
}

// The same where a head's part is 4 x G numbers: G lanes an output and head, several neighbours ahead.
template <int G>
__device__ __forceinline__ void slope_parts(
    const u32* __restrict__ offsets, const u32* __restrict__ nbrs, const float* __restrict__ hidden,
    const float* __restrict__ gradient, float* __restrict__ slopes, u32 inputs, u32 outputs, u32 edges, u32 heads
) {
    const int PREFETCH_DISTANCE = 4;
    u64 part = (u64)blockIdx.x * (256 / G) + threadIdx.x / G;
    u32 lane = threadIdx.x % G, head = part % heads, output = part / heads, columns = heads * 4 * G;
    bool there = part < (u64)outputs * heads;
    u32 start = there ? offsets[output] : 0, end = there ? offsets[output + 1] : 0;
    u32 own = inputs - outputs + (there ? output : 0), column = head * 4 * G + lane * 4;
    Pack<4> slope = load<4>(gradient + (there ? part : 0) * (4 * G) + lane * 4);
    // Groups of a warp take turns together: shuffles need every lane.
    u32 turns = there ? end - start + 1 : 0;
    u32 most = turns;
    for (int distance = 16; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(FULL, most, distance));
    for (u32 turn = 0; turn < most; turn += PREFETCH_DISTANCE) {
        Pack<4> rows[PREFETCH_DISTANCE];
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            u32 edge = start + turn + a;
            if (turn + a < turns)
                rows[a] = load<4>(hidden + (u64)(edge < end ? __ldg(nbrs + edge) : own) * columns + column);
        }
#pragma unroll
        for (int a = 0; a < PREFETCH_DISTANCE; a++) {
            float sum = 0.0f;
            if (turn + a < turns)
#pragma unroll
                for (int v = 0; v < 4; v++) sum += rows[a].x[v] * slope.x[v];
            sum = group_sum<G>(sum);
            u32 edge = start + turn + a;
            u64 row = edge < end ? edge : (u64)edges + output;
            if (turn + a < turns && lane == 0) slopes[row * heads + head] = sum;
        }
    }
}

#define SLOPE_PARTS(G) \
    extern "C" __global__ void __launch_bounds__(256) slope_parts_##G( \
        const u32* offsets, const u32* nbrs, const float* hidden, const float* gradient, float* slopes, u32 inputs, \
        u32 outputs, u32 edges, u32 heads \
    ) { \
        slope_parts<G>(offsets, nbrs, hidden, gradient, slopes, inputs, outputs, edges, heads); \
    }
SLOPE_PARTS(1) SLOPE_PARTS(2) SLOPE_PARTS(4) SLOPE_PARTS(8) SLOPE_PARTS(16) SLOPE_PARTS(32)

// Gradients of the scores from those of the weights, in place, and their sums by output; `dropped` takes the weights
// after dropout.
extern "C" __global__ void score_slopes(
    const u32* offsets, const u32* nbrs, const float* source_scores, const float* target_scores, const float* weights,
    float* slopes, float* target_slopes, float* dropped, u32 inputs, u32 outputs, u32 edges, u32 heads, float slope,
    Dropout dropout
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)outputs * heads) return;
    u32 output = at / heads, head = at % heads, own = inputs - outputs + output;
    u32 start = offsets[output], end = offsets[output + 1];
    float mean = 0.0f, total = 0.0f;
    for (u32 edge = start; edge <= end; edge++) {
        u64 row = edge < end ? edge : (u64)edges + output, place = row * heads + head;
        float factor = drop_factor(dropout, row, head, heads);
        if (dropped) dropped[place] = weights[place] * factor;
        slopes[place] *= factor;
        mean += weights[place] * slopes[place];
    }
    for (u32 edge = start; edge <= end; edge++) {
        u64 row = edge < end ? edge : (u64)edges + output, place = row * heads + head;
        u32 nbr = edge < end ? nbrs[edge] : own;
        float score = source_scores[(u64)nbr * heads + head] + target_scores[at];
        // The weight of a neighbour equal to the node is 0, and so is what follows from it.
        float found = weights[place] * (slopes[place] - mean) * (score > 0.0f ? 1.0f : slope);
        slopes[place] = found;
        total += found;
    }
    target_slopes[at] = total;
}

// The gradient of each input's row from every list it stands in and from its scores; `source_slopes` takes the
// gradient of its score as neighbour.
template <int G, int T, int V>
__device__ __forceinline__ void attend_back(
    const u32* __restrict__ starts, const u32* __restrict__ places, const u32* __restrict__ lists,
    const float* __restrict__ weights, const float* __restrict__ slopes, const float* __restrict__ target_slopes,
    const float* __restrict__ gradient, const float* __restrict__ source, const float* __restrict__ target,
    float* __restrict__ to, float* __restrict__ source_slopes, u32 inputs, u32 outputs, u32 edges, u32 columns, u32 heads
) {
    u32 lane = threadIdx.x % G, input = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (input >= inputs) return;
    u32 first = blockIdx.y * (G * T * V) + lane * V, width = columns / heads, self_first = inputs - outputs;
    bool is_output = input >= self_first;
    u32 start = starts[input], end = starts[input + 1];
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column >= columns) continue;
        u32 head = column / width;
        Pack<V> sum;
        float source_slope = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++) sum.x[v] = 0.0f;
        for (u32 at = start; at < end + is_output; at++) {
            // After the neighbours the self-loop.
            u32 output = at < end ? __ldg(lists + at) : input - self_first;
            if (at < end && self_first + output == input) continue;
            u64 edge = at < end ? __ldg(places + at) : (u64)edges + output;
            float weight = __ldg(weights + edge * heads + head);
            source_slope += __ldg(slopes + edge * heads + head);
            Pack<V> row = load<V>(gradient + (u64)output * columns + column);
#pragma unroll
            for (int v = 0; v < V; v++) sum.x[v] += row.x[v] * weight;
        }
        Pack<V> part = load<V>(source + column);
#pragma unroll
        for (int v = 0; v < V; v++) sum.x[v] += part.x[v] * source_slope;
        if (is_output) {
            float target_slope = target_slopes[(u64)(input - self_first) * heads + head];
            part = load<V>(target + column);
#pragma unroll
            for (int v = 0; v < V; v++) sum.x[v] += part.x[v] * target_slope;
        }
        store<V>(to + (u64)input * columns + column, sum);
        if (column % width == 0) source_slopes[(u64)input * heads + head] = source_slope;
    }
}

#define ATTEND_BACK(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) attend_back_##G##_##T##_##V( \
        const u32* starts, const u32* places, const u32* lists, const float* weights, const float* slopes, \
        const float* target_slopes, const float* gradient, const float* source, const float* target, float* to, \
        float* source_slopes, u32 inputs, u32 outputs, u32 edges, u32 columns, u32 heads \
    ) { \
        attend_back<G, T, V>( \
            starts, places, lists, weights, slopes, target_slopes, gradient, source, target, to, source_slopes, inputs, \
            outputs, edges, columns, heads \
        ); \
    }
FOR_SHAPES(ATTEND_BACK)

// The mean of a row's heads.
extern "C" __global__ void average_heads(const float* from, float* to, u64 count, u32 width, u32 heads) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 row = at / width, column = at % width;
    float sum = 0.0f;
    for (u32 head = 0; head < heads; head++) sum += from[(row * heads + head) * width + column];
    to[at] = sum * (1.0f / (float)heads);
}

// Its gradient: each head's share.
extern "C" __global__ void spread_heads(const float* from, float* to, u64 count, u32 width, u32 heads) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 row = at / ((u64)width * heads), column = at % width;
    to[at] = from[row * width + column] * (1.0f / (float)heads);
}
