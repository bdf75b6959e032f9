// Bias, residual, activation and dropout, forward and backward, and sums of columns. A thread has four columns whose
// dropout comes from the lanes of one random value; a block has 8 rows at a time.

enum { IDENTITY = 0, RELU = 1, ELU = 2, LEAKY_RELU = 3 };
static const float LEAKY_SLOPE = 0.01f;

struct Post {
    Dropout dropout;
    u32 activation;
};

__device__ __forceinline__ float activated(float x, u32 activation) {
    // Comparisons are written so that NaN passes through and is seen by the loss.
    if (activation == RELU) return x < 0.0f ? 0.0f : x;
    if (activation == ELU) return x <= 0.0f ? expf(x) - 1.0f : x;
    if (activation == LEAKY_RELU) return x < 0.0f ? x * LEAKY_SLOPE : x;
    return x;
}

// `to = post(from + bias + add)`; both may be the same memory.
extern "C" __global__ void __launch_bounds__(256) finish_rows(
    float* to, const float* from, const float* bias, const float* add, u32 rows, u32 columns, Post post
) {
    u32 row = blockIdx.x * 8 + threadIdx.y, tiles = (columns + 31) / 32;
    if (row >= rows) return;
    u64 base = (u64)row * columns;
    for (u32 unit = threadIdx.x; unit < tiles * 8; unit += 32) {
        u64 bits = post.dropout.threshold ? value_at(post.dropout.key, (u64)row * tiles * 8 + unit) : 0;
        u32 first = unit / 8 * 32 + unit % 8;
#pragma unroll
        for (u32 lane = 0; lane < 4; lane++) {
            u32 column = first + lane * 8;
            if (column >= columns) continue;
            float x = from[base + column];
            if (bias) x += bias[column];
            if (add) x += add[base + column];
            x = activated(x, post.activation);
            if (post.dropout.threshold)
                x = ((u32)(bits >> (16 * lane)) & 0xffff) < post.dropout.threshold ? 0.0f : x * post.dropout.scale;
            to[base + column] = x;
        }
    }
}

__device__ __forceinline__ float unfinished(float gradient, float output, Post post, u32 word) {
    float scale = post.dropout.threshold ? post.dropout.scale : 1.0f;
    // What was dropped is 0 in the output, as is what was cut off: one comparison does both.
    if (post.activation == RELU) return output > 0.0f ? gradient * scale : 0.0f;
    if (post.dropout.threshold) gradient = word < post.dropout.threshold ? 0.0f : gradient * scale;
    if (post.activation == ELU) return gradient * (output > 0.0f ? 1.0f : output * (1.0f / scale) + 1.0f);
    if (post.activation == LEAKY_RELU) return gradient * (output > 0.0f ? 1.0f : LEAKY_SLOPE);
    return gradient;
}

// Turns the gradient of what `finish_rows` wrote (`output`, where it is given) into that of its sum, and adds up the
// columns of each chunk of `chunk` rows, where `sums` is given.
extern "C" __global__ void __launch_bounds__(256) unfinish_rows(
    float* gradient, const float* output, float* sums, u32 rows, u32 columns, u32 chunk, Post post
) {
    __shared__ float parts[8][32][4];
    u32 tiles = (columns + 31) / 32, start = blockIdx.x * chunk, end = min(start + chunk, rows);
    for (u32 units = 0; units < tiles * 8; units += 32) {
        u32 unit = units + threadIdx.x, first = unit / 8 * 32 + unit % 8;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (unit < tiles * 8) {
            for (u32 row = start + threadIdx.y; row < end; row += 8) {
                u64 base = (u64)row * columns;
                bool random = post.dropout.threshold && post.activation != RELU && output;
                u64 bits = random ? value_at(post.dropout.key, (u64)row * tiles * 8 + unit) : 0;
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    u32 column = first + lane * 8;
                    if (column >= columns) continue;
                    float x = gradient[base + column];
                    if (output) {
                        x = unfinished(x, output[base + column], post, (u32)(bits >> (16 * lane)) & 0xffff);
                        gradient[base + column] = x;
                    }
                    sum[lane] += x;
                }
            }
        }
        if (!sums) continue;
#pragma unroll
        for (u32 lane = 0; lane < 4; lane++) parts[threadIdx.y][threadIdx.x][lane] = sum[lane];
        __syncthreads();
        if (threadIdx.y < 4 && unit < tiles * 8) {
            u32 column = first + threadIdx.y * 8;
            float total = 0.0f;
            for (u32 y = 0; y < 8; y++) total += parts[y][threadIdx.x][threadIdx.y];
            if (column < columns) sums[(u64)blockIdx.x * columns + column] = total;
        }
        __syncthreads();
    }
}

// `finish_rows` without dropout, four columns at once.
extern "C" __global__ void __launch_bounds__(256) finish_packs(
    float* values, const float* bias, const float* add, u32 rows, u32 columns, u32 activation
) {
    u32 row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    u64 base = (u64)row * columns;
    for (u32 column = threadIdx.x * 4; column < columns; column += 128) {
        float4 found = *(float4*)(values + base + column);
        float x[4] = {found.x, found.y, found.z, found.w};
        Pack<4> more = {{0.0f, 0.0f, 0.0f, 0.0f}}, own = more;
        if (bias) more = load<4>(bias + column);
        if (add) own = load<4>(add + base + column);
#pragma unroll
        for (int v = 0; v < 4; v++) x[v] = activated(x[v] + more.x[v] + own.x[v], activation);
        *(float4*)(values + base + column) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// `unfinish_rows` where nothing random is needed, four columns at once: ReLU shows in its output what was dropped.
extern "C" __global__ void __launch_bounds__(256) unfinish_packs(
    float* gradient, const float* output, float* sums, u32 rows, u32 columns, u32 chunk, Post post
) {
    __shared__ float4 parts[8][32];
    u32 start = blockIdx.x * chunk, end = min(start + chunk, rows);
    for (u32 first = 0; first < columns; first += 128) {
        u32 column = first + threadIdx.x * 4;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (column < columns) {
#pragma unroll 4
            for (u32 row = start + threadIdx.y; row < end; row += 8) {
                u64 at = (u64)row * columns + column;
                float4 found = *(float4*)(gradient + at);
                float x[4] = {found.x, found.y, found.z, found.w};
                if (output) {
                    Pack<4> out = load<4>(output + at);
#pragma unroll
                    for (int v = 0; v < 4; v++) x[v] = unfinished(x[v], out.x[v], post, FULL);
                    *(float4*)(gradient + at) = make_float4(x[0], x[1], x[2], x[3]);
                }
#pragma unroll
                for (int v = 0; v < 4; v++) sum[v] += x[v];
            }
        }
        if (!sums) continue;
        parts[threadIdx.y][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        __syncthreads();
        if (threadIdx.y == 0 && column < columns) {
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (u32 y = 0; y < 8; y++) {
                float4 part = parts[y][threadIdx.x];
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            *(float4*)(sums + (u64)blockIdx.x * columns + column) = total;
        }
        __syncthreads();
    }
}

// Sums of columns over chunks, in a fixed order. Blocks of 32 columns and 32 strides.
extern "C" __global__ void __launch_bounds__(1024) add_chunks(const float* sums, float* to, u32 chunks, u32 columns) {
    __shared__ float parts[32][33];
    u32 column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns)
        for (u32 chunk = threadIdx.y; chunk < chunks; chunk += 32) sum += sums[(u64)chunk * columns + column];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        float total = 0.0f;
        for (u32 y = 0; y < 32; y++) total += parts[y][threadIdx.x];
        to[column] = total;
    }
}

// `to[head part] += numbers[row][head] x rows[row][head part]`, chunk by chunk: sums of columns with weights.
extern "C" __global__ void __launch_bounds__(256) weighted_sums(
    const float* values, const float* numbers, float* sums, u32 rows, u32 columns, u32 heads, u32 chunk
) {
    __shared__ float parts[8][32];
    u32 start = blockIdx.x * chunk, end = min(start + chunk, rows), width = columns / heads;
    for (u32 first = 0; first < columns; first += 32) {
        u32 column = first + threadIdx.x;
        float sum = 0.0f;
        if (column < columns)
            for (u32 row = start + threadIdx.y; row < end; row += 8)
                sum += values[(u64)row * columns + column] * numbers[(u64)row * heads + column / width];
        parts[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y == 0 && column < columns) {
            float total = 0.0f;
            for (u32 y = 0; y < 8; y++) total += parts[y][threadIdx.x];
            sums[(u64)blockIdx.x * columns + column] = total;
        }
        __syncthreads();
    }
}

// Numbers rounded to bf16, to the nearest, ties to even; four at a time.
extern "C" __global__ void round_to_bf16(const float* from, unsigned short* to, u64 count) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (u64 at = first; at < first + 4 && at < count; at++) {
        u32 bits = __float_as_uint(from[at]);
        bool nan = (bits & 0x7fffffff) > 0x7f800000;
        to[at] = nan ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// `to = to + from`.
extern "C" __global__ void add_numbers(float* to, const float* from, u64 count) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] += from[at];
}
