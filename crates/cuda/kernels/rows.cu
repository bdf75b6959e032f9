// Rows brought together from where they lie: a matrix, a cache on the device, host memory read over the bus.

// `to[i] = from[rows[i]]`.
template <int G, int T, int V>
__device__ __forceinline__ void gather(
    const float* __restrict__ from, const u32* __restrict__ rows, float* __restrict__ to, u32 count, u32 columns
) {
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= count) return;
    const float* source = from + (u64)__ldg(rows + row) * columns;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column < columns) store<V>(to + (u64)row * columns + column, load<V>(source + column));
    }
}

#define GATHER(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) gather_##G##_##T##_##V( \
        const float* from, const u32* rows, float* to, u32 count, u32 columns \
    ) { \
        gather<G, T, V>(from, rows, to, count, columns); \
    }
FOR_SHAPES(GATHER)

// `to[rows[i]] = from[i]`, or zeros without `from`.
extern "C" __global__ void scatter_rows(const float* from, const u32* rows, float* to, u64 count, u32 columns) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    to[(u64)rows[at / columns] * columns + at % columns] = from ? from[at] : 0.0f;
}

// `to[rows[i]] += scale * from[i]`; rows do not repeat.
extern "C" __global__ void add_rows(
    const float* from, const u32* rows, float* to, u64 count, u32 columns, float scale
) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    to[(u64)rows[at / columns] * columns + at % columns] += scale * from[at];
}

// `columns` columns of every row, from rows of one width to rows of another.
extern "C" __global__ void copy_columns(const float* from, float* to, u64 count, u32 columns, u32 read, u32 written) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 row = at / columns, column = at % columns;
    to[row * written + column] = from[row * read + column];
}

static const u32 ABSENT = 0xffffffffu;

// Where each node's row lies: its slot in the cache by a table with an entry a node; else the place among the others,
// which follow in order in `staged`. `places` holds for each node its place among the misses, or what it is called in
// host memory.
template <int G, int T, int V>
__device__ __forceinline__ void assemble(
    const u32* __restrict__ nodes, const u32* __restrict__ slots, const u32* __restrict__ places,
    const float* __restrict__ cache, const float* __restrict__ others, float* __restrict__ to, u32 count, u32 columns
) {
    u32 lane = threadIdx.x % G, row = blockIdx.x * (blockDim.x / G) + threadIdx.x / G;
    if (row >= count) return;
    u32 slot = __ldg(slots + __ldg(nodes + row));
    const float* source = slot != ABSENT ? cache + (u64)slot * columns : others + (u64)__ldg(places + row) * columns;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
#pragma unroll
    for (int t = 0; t < T; t++) {
        u32 column = first + t * G * V;
        if (column < columns) store<V>(to + (u64)row * columns + column, load<V>(source + column));
    }
}

#define ASSEMBLE(G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) assemble_##G##_##T##_##V( \
        const u32* nodes, const u32* slots, const u32* places, const float* cache, const float* others, float* to, \
        u32 count, u32 columns \
    ) { \
        assemble<G, T, V>(nodes, slots, places, cache, others, to, count, columns); \
    }
FOR_SHAPES(ASSEMBLE)

// Sets the slots of nodes.
extern "C" __global__ void set_slots(u32* slots, const u32* nodes, u32 first_slot, u32 count) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) slots[nodes[at]] = first_slot + at;
}

// A plain copy, for the rate that memory allows.
extern "C" __global__ void __launch_bounds__(256) copy_packs(const float4* from, float4* to, u64 count) {
    u64 at = (u64)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (int step = 0; step < 4; step++, at += 256)
        if (at < count) to[at] = __ldg(from + at);
}
