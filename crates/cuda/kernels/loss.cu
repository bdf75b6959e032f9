// Losses: a warp per row. Each row's loss goes to its own element and its gradient to its own row; sums follow in order.

enum { CLASSES = 0, BINARY = 1, VALUES = 2 };

// `distinct` says that no row occurs twice, so that gradients go where they belong at once; else to `gradient` row by row.
extern "C" __global__ void __launch_bounds__(256) losses(
    const float* logits, const u32* rows, const u32* classes, const float* targets, float* gradient, double* losses,
    u32 count, u32 columns, u32 kind, float scale, u32 distinct
) {
    u32 index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (index >= count) return;
    u32 row = rows[index];
    const float* own = logits + (u64)row * columns;
    float* to = gradient + (u64)(distinct ? row : index) * columns;
    double loss = 0.0;
    if (kind == CLASSES) {
        float most = __int_as_float(0xff800000);
        for (u32 column = lane; column < columns; column += 32) most = own[column] > most ? own[column] : most;
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(FULL, most, distance);
            most = other > most ? other : most;
        }
        double sum = 0.0;
        for (u32 column = lane; column < columns; column += 32) {
            float x = expf(own[column] - most);
            to[column] = x;
            sum += (double)x;
        }
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL, sum, distance);
        float factor = scale / (float)sum;
        u32 class_of = classes[index];
        for (u32 column = lane; column < columns; column += 32)
            to[column] = to[column] * factor - (column == class_of ? scale : 0.0f);
        loss = log(sum) - (double)(own[class_of] - most);
    } else {
        for (u32 column = lane; column < columns; column += 32) {
            float x = own[column], target = targets[(u64)index * columns + column];
            bool known = !isnan(target);
            float slope = 0.0f;
            if (kind == BINARY) {
                float small = expf(-fabsf(x));
                float sigmoid = x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
                slope = (sigmoid - target) * scale;
                float positive = x <= 0.0f ? 0.0f : x;
                if (known) loss += (double)(positive - x * target) + log1p((double)small);
            } else {
                float difference = x - target;
                slope = 2.0f * difference * scale;
                if (known) loss += (double)difference * (double)difference;
            }
            to[column] = known ? slope : 0.0f;
        }
        for (int distance = 16; distance > 0; distance /= 2) loss += __shfl_xor_sync(FULL, loss, distance);
    }
    if (lane == 0) losses[index] = loss;
}

// Adds gradients of rows that may occur several times, in their order: a thread a column.
extern "C" __global__ void add_rows_in_order(const float* from, const u32* rows, float* to, u32 count, u32 columns) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    for (u32 index = 0; index < count; index++) to[(u64)rows[index] * columns + column] += from[(u64)index * columns + column];
}

// One number from many, in a fixed order: a block of 256 threads. The square root where asked.
extern "C" __global__ void __launch_bounds__(256) add_numbers_f64(
    const double* numbers, double* to, u32 count, double divisor, u32 root
) {
    __shared__ double parts[256];
    double sum = 0.0;
    for (u32 at = threadIdx.x; at < count; at += 256) sum += numbers[at];
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0;
        for (u32 at = 0; at < 256; at++) sum += parts[at];
        sum /= divisor;
        *to = root ? sqrt(sum) : sum;
    }
}
