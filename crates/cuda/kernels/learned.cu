// Learned rows: gradients of a repeated row summed in a fixed order, and penalties on their size.

static const u32 MOST_PARTS = 8;

// Matrices whose rows are counted one after the other.
struct Parts {
    const float* part[MOST_PARTS];
    u32 end[MOST_PARTS];
};

__device__ __forceinline__ const float* part_row(const Parts& parts, u32 member, u32 columns) {
    u32 first = 0;
#pragma unroll
    for (u32 at = 0; at < MOST_PARTS; at++) {
        if (member < parts.end[at]) return parts.part[at] + (u64)(member - first) * columns;
        first = parts.end[at];
    }
    return parts.part[0];
}

// `to[i]` = sum of its members, in their order: a thread a column.
extern "C" __global__ void __launch_bounds__(256) sum_rows(
    Parts parts, const u32* offsets, const u32* members, float* to, u32 count, u32 columns
) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)count * columns) return;
    u32 row = at / columns, column = at % columns;
    float sum = 0.0f;
    for (u32 member = offsets[row]; member < offsets[row + 1]; member++)
        sum += part_row(parts, members[member], columns)[column];
    to[at] = sum;
}

// The same for rows with many members: eight warps take every eighth member; their sums are added in order.
extern "C" __global__ void __launch_bounds__(256) sum_many_rows(
    Parts parts, const u32* offsets, const u32* members, float* to, u32 columns
) {
    __shared__ float sums[8][32];
    u32 tiles = (columns + 31) / 32, row = blockIdx.x / tiles;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x % tiles * 32 + lane;
    float sum = 0.0f;
    if (column < columns)
        for (u32 member = offsets[row] + warp; member < offsets[row + 1]; member += 8)
            sum += part_row(parts, members[member], columns)[column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    sum = 0.0f;
    for (u32 at = 0; at < 8; at++) sum += sums[at][lane];
    to[(u64)row * columns + column] = sum;
}

enum { SQUARES = 0, CUBES = 1, COMPLEX_CUBES = 2 };

// The penalty of each row times its weight; its gradient is added. A warp a row.
extern "C" __global__ void __launch_bounds__(256) penalties(
    const float* rows, const float* weights, float* gradient, double* sums, u32 count, u32 columns, u32 kind
) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, half = columns / 2;
    if (row >= count) return;
    const float* own = rows + (u64)row * columns;
    float* to = gradient + (u64)row * columns;
    float weight = weights[row];
    double sum = 0.0;
    for (u32 column = lane; column < (kind == COMPLEX_CUBES ? half : columns); column += 32) {
        float x = own[column];
        if (kind == SQUARES) {
            to[column] += 2.0f * weight * x;
            sum += (double)x * (double)x;
        } else if (kind == CUBES) {
            to[column] += 3.0f * weight * x * fabsf(x);
            sum += (double)x * (double)x * (double)fabsf(x);
        } else {
            float y = own[half + column], modulus = sqrtf(x * x + y * y);
            to[column] += 3.0f * weight * modulus * x;
            to[half + column] += 3.0f * weight * modulus * y;
            sum += (double)modulus * (double)modulus * (double)modulus;
        }
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL, sum, distance);
    if (lane == 0) sums[row] = (double)weight * sum;
}
