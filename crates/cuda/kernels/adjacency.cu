// Transposed adjacency: for each input the nodes whose neighbour it is, ascending. A stable radix sort of (neighbour, edge), so
// that every run gives the same order.

static const u32 THREADS = 256, ROUNDS = 8, WARPS = THREADS / 32, ITEMS = THREADS * ROUNDS, MOST_DIGITS = 128;

// How often each digit occurs in each block's part, digit by digit.
extern "C" __global__ void count_digits(const u32* keys, u32* counts, u32 count, u32 shift, u32 digits) {
    __shared__ u32 local[MOST_DIGITS];
    for (u32 digit = threadIdx.x; digit < digits; digit += THREADS) local[digit] = 0;
    __syncthreads();
    u32 first = blockIdx.x * ITEMS;
    for (u32 round = 0; round < ROUNDS; round++) {
        u32 at = first + round * THREADS + threadIdx.x;
        if (at < count) atomicAdd(&local[keys[at] >> shift & (digits - 1)], 1);
    }
    __syncthreads();
    for (u32 digit = threadIdx.x; digit < digits; digit += THREADS)
        counts[digit * gridDim.x + blockIdx.x] = local[digit];
}

// Sums of all counts before each: one block of 1024 threads.
extern "C" __global__ void scan_counts(u32* counts, u32 count) {
    __shared__ u32 sums[32];
    u32 each = (count + 1023) / 1024, first = threadIdx.x * each, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 last = min(first + each, count), sum = 0;
    for (u32 at = first; at < last; at++) sum += counts[at];
    u32 before = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(FULL, before, distance);
        if (lane >= distance) before += other;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    if (warp == 0) {
        u32 own = sums[lane], total = own;
        for (int distance = 1; distance < 32; distance *= 2) {
            u32 other = __shfl_up_sync(FULL, total, distance);
            if (lane >= distance) total += other;
        }
        sums[lane] = total - own;
    }
    __syncthreads();
    u32 running = sums[warp] + before - sum;
    for (u32 at = first; at < last; at++) {
        u32 own = counts[at];
        counts[at] = running;
        running += own;
    }
}

// Puts each key and value where its digit belongs, in order. Without values the positions themselves are the values.
extern "C" __global__ void __launch_bounds__(256) place_digits(
    const u32* keys, const u32* values, const u32* counts, u32* to_keys, u32* to_values, u32 count, u32 shift,
    u32 digits
) {
    __shared__ u32 seen[WARPS][MOST_DIGITS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 digit = lane; digit < digits; digit += 32) seen[warp][digit] = 0;
    __syncwarp();
    u32 first = blockIdx.x * ITEMS + warp * (32 * ROUNDS);
    u32 key[ROUNDS], rank[ROUNDS];
    for (u32 round = 0; round < ROUNDS; round++) {
        u32 at = first + round * 32 + lane;
        key[round] = at < count ? keys[at] : 0;
        u32 digit = at < count ? key[round] >> shift & (digits - 1) : MOST_DIGITS;
        u32 same = __match_any_sync(FULL, digit);
        u32 earlier = __popc(same & ((1u << lane) - 1));
        u32 base = digit < MOST_DIGITS ? seen[warp][digit] : 0;
        rank[round] = base + earlier;
        __syncwarp();
        if (digit < MOST_DIGITS && earlier == 0) seen[warp][digit] = base + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    // Each warp's start: after those of this digit in earlier blocks and in earlier warps of this one.
    for (u32 digit = threadIdx.x; digit < digits; digit += THREADS) {
        u32 running = counts[digit * gridDim.x + blockIdx.x];
        for (u32 w = 0; w < WARPS; w++) {
            u32 own = seen[w][digit];
            seen[w][digit] = running;
            running += own;
        }
    }
    __syncthreads();
    for (u32 round = 0; round < ROUNDS; round++) {
        u32 at = first + round * 32 + lane;
        if (at >= count) continue;
        u32 place = seen[warp][key[round] >> shift & (digits - 1)] + rank[round];
        to_keys[place] = key[round];
        to_values[place] = values ? values[at] : at;
    }
}

// Which output each edge belongs to.
extern "C" __global__ void edge_outputs(const u32* offsets, u32* owners, u32 outputs) {
    u32 output = blockIdx.x * (blockDim.x / 8) + threadIdx.x / 8;
    if (output >= outputs) return;
    for (u32 edge = offsets[output] + threadIdx.x % 8; edge < offsets[output + 1]; edge += 8) owners[edge] = output;
}

// Where the entries of each input start among sorted keys.
extern "C" __global__ void find_starts(const u32* keys, u32* starts, u32 count, u32 inputs) {
    u32 input = blockIdx.x * blockDim.x + threadIdx.x;
    if (input > inputs) return;
    u32 low = 0, high = count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (keys[middle] < input) low = middle + 1;
        else high = middle;
    }
    starts[input] = low;
}

// `to[i] = from[places[i]]`.
extern "C" __global__ void pick_words(const u32* from, const u32* places, u32* to, u32 count) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] = from[places[at]];
}
