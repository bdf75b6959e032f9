// Layer norm by rows and batch norm by columns. Sums of columns are taken in f64 over fixed chunks.

// Normalises rows in place, a warp a row; `deviations` takes the reciprocal deviation of each.
extern "C" __global__ void __launch_bounds__(256) layer_norm(
    float* values, float* to, float* deviations, const float* scale, const float* shift, u32 rows, u32 columns,
    float epsilon
) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float* own = values + (u64)row * columns;
    float sum = 0.0f;
    for (u32 column = lane; column < columns; column += 32) sum += own[column];
    float mean = group_sum<32>(sum) / (float)columns;
    sum = 0.0f;
    for (u32 column = lane; column < columns; column += 32) sum += (own[column] - mean) * (own[column] - mean);
    float reciprocal = 1.0f / sqrtf(group_sum<32>(sum) / (float)columns + epsilon);
    for (u32 column = lane; column < columns; column += 32) {
        float x = (own[column] - mean) * reciprocal;
        own[column] = x;
        to[(u64)row * columns + column] = x * scale[column] + shift[column];
    }
    if (lane == 0) deviations[row] = reciprocal;
}

// Gradient of the scaled rows into that of what was normalised, in place.
extern "C" __global__ void __launch_bounds__(256) layer_norm_back(
    float* gradient, const float* normalised, const float* scale, const float* deviations, u32 rows, u32 columns
) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float* own = gradient + (u64)row * columns;
    const float* x = normalised + (u64)row * columns;
    float plain = 0.0f, along = 0.0f;
    for (u32 column = lane; column < columns; column += 32) {
        float g = own[column] * scale[column];
        plain += g;
        along += g * x[column];
    }
    plain = group_sum<32>(plain) / (float)columns;
    along = group_sum<32>(along) / (float)columns;
    for (u32 column = lane; column < columns; column += 32)
        own[column] = (own[column] * scale[column] - plain - x[column] * along) * deviations[row];
}

// Sums over a chunk of rows: of columns, and of `a x b` or of squares of distances from `mean`. Blocks of 32 columns and
// 8 strides; chunk by `blockIdx.x`, columns by `blockIdx.y`.
extern "C" __global__ void __launch_bounds__(256) column_sums(
    const float* a, const float* b, const float* mean, double* sums, u32 rows, u32 columns, u32 chunk
) {
    __shared__ double plain[8][32], along[8][32];
    u32 column = blockIdx.y * 32 + threadIdx.x, start = blockIdx.x * chunk, end = min(start + chunk, rows);
    double one = 0.0, two = 0.0;
    if (column < columns) {
        for (u32 row = start + threadIdx.y; row < end; row += 8) {
            u64 at = (u64)row * columns + column;
            double x = a[at], y = mean ? (double)(a[at] - mean[column]) : (double)b[at];
            one += x;
            two += mean ? y * y : x * y;
        }
    }
    plain[threadIdx.y][threadIdx.x] = one;
    along[threadIdx.y][threadIdx.x] = two;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        one = two = 0.0;
        for (u32 y = 0; y < 8; y++) one += plain[y][threadIdx.x], two += along[y][threadIdx.x];
        sums[(u64)blockIdx.x * 2 * columns + column] = one;
        sums[(u64)blockIdx.x * 2 * columns + columns + column] = two;
    }
}

// Chunks together, in order: `plain` and `along` take the sums divided by `divisor`.
extern "C" __global__ void add_column_sums(
    const double* sums, float* plain, float* along, u32 chunks, u32 columns, double divisor
) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    double one = 0.0, two = 0.0;
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        one += sums[(u64)chunk * 2 * columns + column];
        two += sums[(u64)chunk * 2 * columns + columns + column];
    }
    if (plain) plain[column] = (float)(one / divisor);
    if (along) along[column] = (float)(two / divisor);
}

// Moves the running statistics, and turns the variance into the reciprocal deviation.
extern "C" __global__ void batch_statistics(
    const float* mean, const float* variance, float* running_mean, float* running_variance, float* reciprocals,
    u32 columns, float momentum, float unbias, float epsilon
) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    if (running_mean) {
        running_mean[column] += momentum * (mean[column] - running_mean[column]);
        running_variance[column] += momentum * (variance[column] * unbias - running_variance[column]);
    }
    reciprocals[column] = 1.0f / sqrtf(variance[column] + epsilon);
}

// Normalises columns in place and writes the scaled and shifted numbers.
extern "C" __global__ void batch_norm(
    float* values, float* to, const float* mean, const float* reciprocals, const float* scale, const float* shift,
    u64 count, u32 columns
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u32 column = at % columns;
    float x = (values[at] - mean[column]) * reciprocals[column];
    values[at] = x;
    to[at] = x * scale[column] + shift[column];
}

extern "C" __global__ void batch_norm_back(
    float* gradient, const float* normalised, const float* scale, const float* reciprocals, const float* mean,
    const float* along, u64 count, u32 columns
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u32 column = at % columns;
    float factor = scale[column] * reciprocals[column];
    gradient[at] = factor * (gradient[at] - mean[column] - normalised[at] * along[column]);
}
